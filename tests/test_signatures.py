"""The public interface stays what others rest on."""

import json

from tests.signatures import FILE, signatures


def test_what_is_public_takes_what_it_took():
    assert signatures() == json.loads(FILE.read_text())
