"""Dead letters on the page: seen, replayed when the sink is well again, dropped; and who did it."""

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect
from tests.browser.towns import site


@pytest.fixture(scope="module")
def office(tmp_path_factory):
    folder = tmp_path_factory.mktemp("office")
    with site(folder) as running:
        running.folder = folder
        yield running


def open_letter(page, event):
    row = page.locator("table tbody tr").filter(has_text=event["id"])
    row.get_by_role("link").first.press("Enter")
    expect(page.get_by_role("main")).to_contain_text(event["id"])


def explained(office, event):
    """What `oncebridge explain` tells of an event, from outside."""
    done = subprocess.run(
        [sys.executable, "-m", "oncebridge", "explain", "-", "-c", "oncebridge.toml", "--json"],
        cwd=office.folder,
        input=json.dumps(event).encode(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return done.stdout.decode()


def test_a_letter_is_replayed_once_the_sink_is_well(visits, office):
    event, word = office.kill_letter()
    page = visits.open(f"{office.url}/dead")
    expect(page.get_by_role("main")).to_contain_text("422")
    open_letter(page, event)
    main = page.get_by_role("main")
    expect(main).to_contain_text("rejected")
    expect(main.locator("pre").first).to_contain_text(word)
    office.sink.refused.discard(word)
    page.get_by_role("button", name=re.compile("Replay")).click()
    assert not office.sink.has(word)  # it was asked first
    expect(page.get_by_role("main")).to_contain_text(event["id"])
    page.get_by_label(re.compile("^Reason")).fill("the CRM is back")
    page.get_by_role("button", name=re.compile("Replay")).click()
    expect(page.get_by_role("main")).to_contain_text("delivered")
    assert office.sink.has(word) == 1
    page.goto(f"{office.url}/dead")
    expect(page.get_by_role("main")).not_to_contain_text(event["id"])
    page.goto(f"{office.url}/decisions?q={event['id']}")
    page.get_by_role("link", name=re.compile(r"Why\? delivered")).first.click()
    expect(page.get_by_role("main")).to_contain_text("replay")
    expect(page.get_by_role("main")).to_contain_text("the CRM is back")
    told = explained(office, event)
    assert "replay" in told
    assert "the CRM is back" in told


@pytest.mark.full
def test_a_letter_whose_sink_still_refuses_stays(visits, office):
    event, word = office.kill_letter()
    page = visits.open(f"{office.url}/dead")
    open_letter(page, event)
    page.get_by_role("button", name=re.compile("Replay")).click()
    page.get_by_role("button", name=re.compile("Replay")).click()
    expect(page.get_by_role("main")).to_contain_text("dead")
    page.goto(f"{office.url}/dead")
    expect(page.get_by_role("main")).to_contain_text(event["id"])
    assert not office.sink.has(word)


@pytest.mark.full
def test_several_letters_are_dropped_together_and_never_sent(visits, office):
    letters = [office.kill_letter() for _ in range(2)]
    page = visits.open(f"{office.url}/dead")
    for event, _ in letters:
        page.locator("table tbody tr").filter(has_text=event["id"]).get_by_role("checkbox").check()
    page.get_by_role("button", name=re.compile("Drop selected")).first.click()
    expect(page.get_by_role("main")).to_contain_text("2")
    page.get_by_role("button", name=re.compile("Drop")).click()
    expect(page.get_by_role("main")).to_contain_text(re.compile("dropped", re.IGNORECASE))
    page.goto(f"{office.url}/dead")
    for event, word in letters:
        expect(page.get_by_role("main")).not_to_contain_text(event["id"])
        assert not office.sink.has(word)
    assert "drop" in explained(office, letters[0][0])


@pytest.mark.full
def test_a_change_of_mind_changes_nothing(visits, office):
    event, _ = office.kill_letter()
    page = visits.open(f"{office.url}/dead")
    open_letter(page, event)
    page.get_by_role("button", name=re.compile("Drop")).click()
    page.get_by_role("link", name="Cancel").click()
    expect(page).to_have_url(re.compile("/dead/[0-9]+$"))
    page.goto(f"{office.url}/dead")
    expect(page.get_by_role("main")).to_contain_text(event["id"])


@pytest.mark.full
def test_all_on_a_page_are_ticked_at_once(visits, office):
    for _ in range(2):
        office.kill_letter()
    page = visits.open(f"{office.url}/dead")
    boxes = page.locator("table tbody input[type=checkbox]")
    page.get_by_label(re.compile("All on this page")).check()
    assert all(box.is_checked() for box in boxes.all())
    assert len(boxes.all()) >= 2
    boxes.first.uncheck()
    assert not page.get_by_label(re.compile("All on this page")).is_checked()


@pytest.fixture
def shut_office(tmp_path):
    with site(tmp_path, arguments=("--dashboard-write", "false")) as running:
        yield running


@pytest.mark.full
def test_who_may_only_look_has_no_button_to_do_it(shut_office, visits):
    event, _ = shut_office.kill_letter()
    page = visits.open(f"{shut_office.url}/dead", allowed=("403",))
    for _ in ("the list", "the letter"):
        expect(page.get_by_role("main")).to_contain_text(event["id"])
        expect(page.get_by_role("button", name=re.compile("Replay|Drop"))).to_have_count(0)
        page.goto(f"{shut_office.url}/dead/1")
    status = page.evaluate(
        "async () => (await fetch('/dead/drop', {method: 'POST', "
        "body: new URLSearchParams({numbers: '1'})})).status"
    )
    assert status == 403
