"""Several workers on one store, seen by a dashboard of its own beside them: they add up."""

import json
import re

import pytest
from playwright.sync_api import expect
from tests.browser.towns import CONFIG, Site, order, sinking
from tests.e2e.towns import Command

pytestmark = pytest.mark.full


class Fleet:
    """Workers that share what lies in one folder, and somebody who only looks."""

    def __init__(self, folder, sink):
        self._folder = folder
        self._sink = sink
        self.commands = []
        (folder / "oncebridge.toml").write_text(CONFIG.format(sink=sink.url, more=""))

    def worker(self):
        return Site(self._run("run"), self._sink)

    def dashboard(self):
        command = self._run("dashboard")
        command.until(lambda: b"dashboard: http" in command.printed)
        return re.search(r"http://\S+", command.printed.decode())[0].rstrip("/")

    def _run(self, verb):
        command = Command(self._folder, verb, "-c", "oncebridge.toml")
        self.commands.append(command)
        return command


@pytest.fixture
def fleet(tmp_path):
    with sinking() as sink:
        made = Fleet(tmp_path, sink)
        yield made
        for command in made.commands:
            with command:
                command.process.kill()


def stop(worker):
    worker.command.signal()
    assert worker.command.process.wait(30) == 0


def test_the_counts_of_workers_add_up_and_outlast_them(fleet, visits):
    one, two = fleet.worker(), fleet.worker()
    page = visits.open(fleet.dashboard())
    working = page.locator("#workers tbody tr").filter(has_text="running")
    expect(working).to_have_count(2)
    events = [order() for _ in range(6)]
    assert {one.send(event) for event in events} == {"delivered"}
    assert {two.send(event) for event in events[:4]} == {"duplicate"}
    stop(one)
    stop(two)
    tiles = page.locator("#rates > div")
    expect(tiles.nth(0)).to_contain_text("10 in total")
    expect(tiles.nth(1)).to_contain_text("6 in total")
    expect(tiles.nth(2)).to_contain_text("4 in total")
    expect(working).to_have_count(0)
    three = fleet.worker()
    assert three.send(events[0]) == "duplicate"
    own = visits.open(three.url)
    expect(own.locator("#rates > div").nth(0)).to_contain_text("11 in total")
    own.goto("about:blank")
    stop(three)
    expect(tiles.nth(0)).to_contain_text("11 in total")
    expect(page.locator("#routes")).to_contain_text("11 received = 11 decided")


def test_arrivals_of_all_workers_are_found_from_beside_them(fleet, visits):
    one, two = fleet.worker(), fleet.worker()
    event = order()
    assert [one.send(event), two.send(json.dumps(event).encode())] == ["delivered", "duplicate"]
    page = visits.open(f"{fleet.dashboard()}/decisions")
    rows = page.locator("table.decisions tbody tr")
    expect(rows).to_have_count(2)  # as soon as both have written what they saw
    expect(rows.nth(0)).to_contain_text("redelivery")
    rows.nth(0).get_by_role("link", name=re.compile(r"Why\?")).click()
    expect(page.locator("section[aria-labelledby=line]")).to_contain_text("(2)")
