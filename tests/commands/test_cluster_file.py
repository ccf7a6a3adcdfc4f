"""Cluster files: values, warnings and one-line errors."""

import os
import re
from pathlib import Path

import pytest

from fdg.commands.cluster_file import read_cluster
from fdg.costs.hardware import RATES
from fdg.errors import FdgError, FdgWarning
from tests.refusing import refuses

GOOD = """
hosts = 4
kind = "H100"
price = 2.5
failures_per_device_hour = 1e-5
"""


LINK = 'hosts = 1\nkind = "H100"\ninside = "W"\n[links.W]\nlatency = {}\nbandwidth = {}'
KIND = 'hosts = 1\nkind = "A"\n[kinds.A]\nlike = "H100"\n"{}" = {}'


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


def test_default_links(file):
    found = read_cluster(file(GOOD))
    assert (found.hosts, found.devices_per_host, found.devices) == (4, 8, 32)
    assert found.inside.name == "NVLink 4" and found.between.name == "InfiniBand NDR"
    assert found.price == 2.5 and found.failures == 1e-5
    assert "data sheet" in found.kind.figures["memory"].source


@pytest.mark.parametrize(
    ("name", "memory"),
    [("NVIDIA A100-SXM4-40GB", 40e9), ("NVIDIA A100-SXM4-80GB", 80e9), ("Tesla V100-SXM2-16GB", 16e9)],
)
def test_memory_of_kinds_by_jax_names(file, name, memory):
    found = read_cluster(file(f'hosts = 1\nkind = "{name}"'))
    assert found.kind.rate("memory_bytes") == memory
    assert found.inside.name == ("NVLink 2" if "V100" in name else "NVLink 3")


def test_user_defined_kinds_and_links(file):
    text = """
    devices = 10000
    devices_per_host = 4
    kind = "Mine"
    inside = "Wire"
    between = "Ethernet 10"
    [kinds.Mine]
    like = "H100"
    memory = 1e12
    [links.Wire]
    latency = 1e-6
    bandwidth = 1e10
    """
    found = read_cluster(file(text))
    assert found.devices == 10_000 and found.kind.rate("memory") == 1e12
    assert found.kind.platform == "gpu" and found.inside.bandwidth.value == 1e10


FIRST = """
hosts = 4
kind = "A100"
between = "Ethernet 100"
[first]
hosts = 480
devices_per_host = 32
kind = "Fleet"
price = 0.02
[kinds.Fleet]
like = "CPU core"
host_call = 1.5
"""


def test_hosts_of_another_kind(file):
    found = read_cluster(file(FIRST))
    assert (found.devices, found.first.devices, found.of(15_376).hosts) == (15_392, 15_360, 2)
    assert found.first.kind.platform == "cpu" and found.first.kind.rate("host_call") == 1.5
    assert found.first.between == found.between  # by default
    assert found.platforms(15_361)[-2:] == ["cpu", "gpu"]
    assert found.per_hour("price", range(15_350, 15_370)) == pytest.approx(10 * 0.02)
    assert [part.kind.name for part in found.parts] == ["Fleet", "A100"]
    assert "those of Fleet, rough; those of A100, published" in found.note
    with pytest.raises(FdgError, match=r"15370 devices are not .* of 8: use 15368 or 15376"):
        found.of(15_370)
    cores = read_cluster(file(FIRST.replace('"Fleet"', '"CPU core"'))).first
    assert cores.cores == 32
    slow = read_cluster(file("straggling = 0.02\nrestart_seconds = 10" + FIRST))
    assert (slow.of(32).straggling, slow.of(32).restart) == (0.02, 10)


def test_hosts_of_another_kind_are_on_the_same_network_by_default(file):
    """Also if the link is that of a calibration, or has control characters in its name."""
    wire = r'between = "\u001b"' + FIRST.replace('between = "Ethernet 100"', "")
    found = read_cluster(file(wire + '[links."\\u001b"]\nlatency = 1e-6\nbandwidth = 1e10'))
    assert found.first.between == found.between and found.between.name == r"\x1b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FIRST.replace("hosts = 480", "host = 480"), "unknown setting of [first] 'host'"),
        (FIRST.replace("hosts = 480", "hosts = 0"), "[first] hosts = 0: give a whole number"),
        ('first = 3\nhosts = 4\nkind = "A100"', "hosts of another kind as a table [first]"),
        (FIRST.replace('like = "CPU core"', 'like = "CPU cores"'), "unknown device kind 'CPU cores'"),
        (GOOD.replace("price", "prise"), "unknown setting of a cluster 'prise': did you mean 'price'"),
        (GOOD.replace("H100", "H1000"), "unknown device kind 'H1000': did you mean 'H100'"),
        (GOOD.replace("hosts = 4", "hosts = -4"), "hosts = -4: give a whole number of at least 1"),
        (GOOD.replace("hosts = 4", "hosts = 4.5"), "hosts = 4.5: give a whole number"),
        (GOOD.replace("hosts = 4", "hosts = '4'"), "hosts = '4': give a whole number of at least 1: write 4"),
        (GOOD.replace("2.5", "'2.5 per h'"), "of at least 0, per device and hour, in any currency, such as"),
        (
            GOOD + "restart_seconds = '5 min'",
            "s from a failure until the last checkpoint is loaded: write 300",
        ),
        (GOOD + "storage_bytes_per_second = '1 GB/s'", "of all hosts together: write 1_000_000_000 or 1e9"),
        (
            LINK.format("'5 us'", "1e11"),
            "latency = '5 us': give a number of at least 0, s until the first byte",
        ),
        (LINK.format("5e-6", "'400 Gbit/s'"), "write 50_000_000_000 or 5e10"),
        (LINK.format("5e-6", "true"), "bandwidth = True: give a number of at least 0, B/s one way"),
        (GOOD.replace("2.5", "-1"), "price = -1: give a number of at least 0"),
        (GOOD.replace("2.5", "nan"), "price = nan: give a number"),
        (GOOD + 'inside = "NVLink 44"', "unknown link 'NVLink 44': did you mean 'NVLink 4'"),
        (GOOD + "hosts = 5", "is not TOML"),
        (GOOD + f"a = {'[' * 5000}", "is not TOML"),
        (GOOD + f"a = {'9' * 5000}", "is not TOML"),
        ('kind = "H100"', "'hosts' is missing"),
        ("hosts = 1", "'kind' is missing"),
        ('hosts = 1\nkind = "A"\n[kinds.A]\nmemory = 1', "needs platform"),
        ('hosts = 1\nkind = "A"\n[kinds.A]\nlike = "H100"\nmemori = 1', "did you mean 'memory'"),
        ('hosts = 1\nkind = "A"\n[kinds.A]\nplatform = "gpu"\nmemory = 1e12', "lacks figures: give 'memory'"),
        ('hosts = 1\nkind = "A"\n[kinds.A]\nplatform = "xpu"\nmemory = 1e12', "one of cpu, gpu, tpu"),
        ('hosts = 1\nkind = "H100"\ninside = "W"\n[links.W]\nlatency = 1', "needs bandwidth"),
        ("hosts = 1\nkind = 3", "give a name in quotes"),
        (KIND.format("convolution", 5), "convolution = 5.0: give a share, from 0 to 1; for 5% write 0.05"),
        (KIND.format("convolution", 0), "that convolutions reach, a number above 0"),
        (GOOD + "storage_bytes_per_second = inf", "storage = inf: give bytes per second above 0"),
        (KIND.format("parallel", 1.5), "parallel = 1.5: give a share, from 0 to 1"),
    ],
)
def test_errors(file, text, message):
    with pytest.raises(FdgError) as raised:
        read_cluster(file(text))
    assert message in str(raised.value) and "\n" not in str(raised.value).strip()


@pytest.mark.parametrize("rate", RATES)
def test_rate_errors_name_quantity_and_unit(file, rate):
    with refuses(f"[kinds.A] {rate} = 'much': give a number of at least 0, {RATES[rate].meaning}, such as "):
        read_cluster(file(KIND.format(rate, "'much'")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KIND.format("memory", 80e9), "memory = 8e.10 is B/s .*: it looks like memory_bytes = 8e"),
        (
            KIND.format("memory_bytes", 3.35e12),
            "memory_bytes = 3.35e.* is B of .*: it looks like memory = 3.35e",
        ),
        (KIND.format("memory", 3350), "memory = 3350 is B/s .*: published values are from 6.2e"),
        (KIND.format("product/float32", 67), "FLOP/s of large products .*: published values are from"),
        (LINK.format(5, 1e11), "latency = 5 is s until .*: published values are from 6e-07"),
        (LINK.format(5e-6, 400), "bandwidth = 400 is B/s one way, .*: published values are from"),
    ],
)
def test_implausible_numbers_warn(file, text, message):
    with pytest.warns(FdgWarning, match=message):
        read_cluster(file(text))
    for words in ("'80 GB'", "'3.35 TB/s'"):
        with pytest.raises(FdgError) as raised:
            read_cluster(file(KIND.format("memory", words)))
        assert ("looks like memory_bytes = 8e" in str(raised.value)) == (words == "'80 GB'")


def test_control_characters_of_names_are_escaped(file):
    kind, link = KIND.format("memory", 1e12), LINK.format(1e-6, 1e11)
    found = read_cluster(file(kind.replace('"A"', r'"\u001b[2J"').replace("kinds.A", r'kinds."\u001b[2J"')))
    assert found.kind.name == r"\x1b[2J" and "\x1b" not in found.note
    found = read_cluster(file(link.replace('"W"', r'"\u001b[2J"').replace("links.W", r'links."\u001b[2J"')))
    assert found.inside.name == r"\x1b[2J"


def test_missing_file(tmp_path):
    with pytest.raises(FdgError, match="docs/scale"):
        read_cluster(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(FdgError, match=r"is a FIFO: .*docs/scale"):
        read_cluster(tmp_path / "fifo.toml")


def test_this_machine_without_a_calibration(file, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FdgError, match=r"no calibration: run python -m fdg.calibrate"):
        read_cluster(file('hosts = 1\nkind = "this machine"'))


def test_files_in_the_guide(file):
    guide = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    assert [read_cluster(file(block)).devices for block in blocks] == [4096, 8, 15_392]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"hosts = 1{'0' * 400}\nkind = 'H100'", "'hosts' does not fit 64 bits"),
        ("hosts = 1000000000000\nkind = 'H100'", "hosts = 1000000000000 of devices_per_host = 8 have"),
        (FIRST.replace("hosts = 480", "hosts = 32768"), "1,048,576 devices, those of [first] included"),
        (f"hosts = 1\nkind = 'H100'\nprice = 1{'0' * 400}", "'price' does not fit 64 bits"),
        (f"hosts = 1\nkind = 'A'\nkinds = {'[' * 99}{']' * 99}", "is nested more than 64 levels deep"),
        ("hosts = 1\nkind = 'A'\n[kinds.A]\nlike = []", "unknown device kind '[]'"),
        ("hosts = 1\nkind = 'A'\n[kinds.A]\nlike = {a = 1}", "unknown device kind '{'a': 1}'"),
        (f"hosts = 1\nkind = '{'A' * 5000}'", f"unknown device kind '{'A' * 97}...'"),
    ],
    ids=["hosts", "devices", "first", "price", "deep", "list", "table", "long"],
)
def test_extreme_values(file, text, message):
    with pytest.raises(FdgError) as caught:
        read_cluster(file(text))
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000
