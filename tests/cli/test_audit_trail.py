import json
import logging
import subprocess
import sys

import pytest

from oncebridge.audit_trail import AuditTrail, instant
from oncebridge.errors import ConfigError


def test_each_act_is_one_line_with_who_when_and_what(tmp_path, caplog):
    path = tmp_path / "audit.ndjson"
    trail = AuditTrail(str(path), clock=lambda: 1_700_000_000_123)
    with caplog.at_level(logging.INFO, "oncebridge"):
        trail.write("forget", keys=["01ab"])
        trail.write("pause", routes=["crm"])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["verb"] for line in lines] == ["forget", "pause"]
    assert lines[0]["time"] == "2023-11-14T22:13:20.123Z"
    assert lines[0]["user"]
    assert lines[0]["host"]
    assert lines[0]["keys"] == ["01ab"]
    assert [record.verb for record in caplog.records] == ["forget", "pause"]


def test_without_a_file_the_log_alone_has_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "oncebridge"):
        AuditTrail(None).write("pause", routes=["crm"])
    assert [record.getMessage() for record in caplog.records] == ["oncebridge.audit"]
    assert not list(tmp_path.iterdir())


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "audit.ndjson"
    path.write_text('{"verb": "forg')
    AuditTrail(str(path)).write("pause")
    assert json.loads(path.read_text().splitlines()[1])["verb"] == "pause"


def test_a_file_that_cannot_be_written_is_an_error_before_the_act(tmp_path):
    with pytest.raises(ConfigError, match="nothing was done"):
        AuditTrail(str(tmp_path)).write("pause")
    with pytest.raises(ConfigError, match="No such file"):
        AuditTrail(str(tmp_path / "no" / "audit")).write("pause")


MANY = """
from oncebridge.audit_trail import AuditTrail
for _ in range(50):
    AuditTrail("audit.ndjson").write("pause", routes=["x" * 5000])
"""


def test_lines_of_several_processes_do_not_mix(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", MANY], cwd=tmp_path, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [writer.wait(30) for writer in writers] == [0, 0]
    lines = (tmp_path / "audit.ndjson").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 100


def test_an_instant_is_written_in_utc():
    assert instant(0) == "1970-01-01T00:00:00.000Z"
