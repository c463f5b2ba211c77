"""The package and the layer hold what a function needs, for its processor, and nothing else."""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.servers.lambda_runtime import ARCH, PYTHON, ROOT, builder

LOCK = (ROOT / "requirements" / "lambda.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MACHINES = {"x86_64": 62, "arm64": 183}
OURS = {"httptools", "jmespath", "msgspec", "oncebridge"}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build everything for the usual Python, once for each worker."""
    folder = tmp_path_factory.mktemp("packages")
    build = builder().build
    return {
        (kind, arch): build(arch, folder, layer=kind == "layer")
        for kind in ("lambda", "layer")
        for arch in MACHINES
    }


@pytest.fixture(params=["lambda", "layer"])
def kind(request):
    return request.param


@pytest.fixture(params=sorted(MACHINES))
def arch(request):
    return request.param


@pytest.fixture
def entries(built, kind, arch):
    with zipfile.ZipFile(built[kind, arch]) as archive:
        return {entry.filename: entry for entry in archive.infolist()}


def test_files_are_named_after_what_they_are(built, kind, arch):
    assert built[kind, arch].name == f"oncebridge-{kind}-{arch}.zip"


@pytest.mark.parametrize(("kind", "arch"), [("lambda", "x86_64"), ("layer", "arm64")])
def test_two_builds_are_the_same_to_the_byte(built, kind, arch, tmp_path):
    again = builder().build(arch, tmp_path / "new" / "folder", layer=kind == "layer")
    assert sha256(again) == sha256(built[kind, arch])


def test_nothing_in_it_depends_on_when_and_where_it_was_built(built, entries, kind, arch):
    assert list(entries) == sorted(entries)
    for entry in entries.values():
        assert entry.date_time == (1980, 1, 1, 0, 0, 0)
        assert entry.external_attr >> 16 == 0o100644
        assert entry.create_system == 3
    left_over = r"RECORD$|INSTALLER$|REQUESTED$|direct_url|\.pyc$|__pycache__|/bin/|\.data/|/$"
    assert not [name for name in entries if re.search(left_over, name)]
    assert str(ROOT).encode() not in built[kind, arch].read_bytes()


def test_a_layer_is_the_package_below_python(built, arch):
    with zipfile.ZipFile(built["lambda", arch]) as package:
        files = {name: package.read(name) for name in package.namelist()}
    with zipfile.ZipFile(built["layer", arch]) as layer:
        assert {f"python/{name}": data for name, data in files.items()} == {
            name: layer.read(name) for name in layer.namelist()
        }


def test_what_is_compiled_is_for_the_processor_and_the_python(built, entries, kind, arch):
    compiled = [name for name in entries if name.endswith(".so")]
    assert len(compiled) >= 3
    with zipfile.ZipFile(built[kind, arch]) as archive:
        for name in compiled:
            head = archive.read(name)[:20]
            assert head[:4] == b"\x7fELF"
            assert struct.unpack_from("<H", head, 18) == (MACHINES[arch],)
            assert f".cpython-{builder().PYTHON.replace('.', '')}-" in name


def test_it_holds_what_we_need_and_not_what_lambda_brings(built, kind, arch):
    found = builder().packages(built[kind, arch])
    assert set(found) == OURS
    assert found["oncebridge"][0] == PROJECT["version"]
    assert all(size > 10_000 for _, size in found.values())
    assert built[kind, arch].stat().st_size < 3_000_000


def test_every_licence_comes_along(entries):
    licensed = {
        re.search(r"([^/]+?)-[^/]+\.dist-info/", name)[1]
        for name in entries
        if re.search(r"\.dist-info/.*LICENSE", name)
    }
    assert licensed == OURS


LOOK = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from importlib.metadata import entry_points, version
from oncebridge.service.addresses import SinkPlace, StorePlace
import oncebridge
groups = {}
for kind in ("sources", "stores", "sinks", "dead_letters"):
    groups[kind] = sorted(point.name for point in entry_points(group=f"oncebridge.{kind}"))
opened = [SinkPlace.of("https://crm.example.com/"), StorePlace.of("sqlite:x.db")]
print(json.dumps([version("oncebridge"), oncebridge.__file__, groups, [str(o) for o in opened]]))
"""


def test_it_runs_alone_and_finds_its_backends(tmp_path):
    path = builder().build(ARCH, tmp_path, python=PYTHON)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "task")
    done = subprocess.run(
        [
            getattr(sys, "_base_executable", sys.executable),
            "-I",
            "-S",
            "-c",
            LOOK,
            tmp_path / "task",
        ],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    version, file, groups, opened = json.loads(done.stdout)
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(tmp_path)
    declared = PROJECT["entry-points"]
    assert groups == {kind: sorted(declared[f"oncebridge.{kind}"]) for kind in groups}
    assert opened == ["https://crm.example.com/", "sqlite:x.db"]


def test_botocore_comes_along_where_that_is_asked_for(tmp_path):
    path = builder().build(ARCH, tmp_path, python=PYTHON, with_botocore=True)
    found = builder().packages(path)
    assert set(found) == OURS | {"botocore", "python_dateutil", "six", "urllib3"}
    assert f"botocore=={found['botocore'][0]} " in LOCK


def test_bytecode_is_made_by_its_own_python_only(tmp_path):
    build = builder().build
    path = build(ARCH, tmp_path / "a", python=PYTHON, compiled=True)
    assert sha256(path) == sha256(build(ARCH, tmp_path / "b", python=PYTHON, compiled=True))
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        data = archive.read(next(name for name in names if name.endswith(".pyc")))
    sources = [name for name in names if name.endswith(".py")]
    assert len([name for name in names if name.endswith(".pyc")]) == len(sources)
    assert struct.unpack_from("<I", data, 4) == (1,)  # known by a hash, and never compared
    with pytest.raises(SystemExit, match=r"bytecode for Python 3\.99 is made by it"):
        build(ARCH, tmp_path, python="3.99", compiled=True)


def test_the_table_says_what_was_built(tmp_path, capsys):
    builder().main([str(tmp_path), "--python", PYTHON, "--arch", ARCH])
    shown = capsys.readouterr().out
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == [
        f"oncebridge-lambda-{ARCH}.zip",
        f"oncebridge-layer-{ARCH}.zip",
    ]
    for path in made:
        line = rf"(?m)^{path.name} +[\d,]+ kB  {sha256(path)}$"
        assert re.search(line, shown)
    assert shown.count("msgspec") == 2


def test_what_is_pinned_is_hashed_and_names_no_place():
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", LOCK)
    names = {block.partition("==")[0] for block in blocks if block}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dynamodb"], *extras["http"]]
    assert {re.match(r"[\w-]+", one)[0] for one in wanted} <= names
    assert all("--hash=sha256:" in block for block in blocks if block)
    assert not re.search(r"index|https?:|file:", LOCK)
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", LOCK))
    tried = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", (ROOT / "requirements/dev.txt").read_text()))
    assert {name: tried[name] for name in pins} == pins  # what is shipped is what is tested
