"""The public interface is the one in `signatures.json`."""

import json

from tests.signatures import FILE, signatures


def test_public_signatures():
    assert signatures() == json.loads(FILE.read_text())
