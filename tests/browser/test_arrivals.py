"""An event sent twice, seen as people see it: live, found again, and explained."""

import re

import pytest
from playwright.sync_api import expect
from tests.browser.towns import order, site


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with site(tmp_path_factory.mktemp("shop")) as running:
        yield running


def row_of(page, text):
    return page.locator("table.decisions tbody tr").filter(
        has=page.locator(f"code[title='{text}']")
    )


def test_an_event_sent_twice_shows_once_as_delivered_and_once_as_duplicate(visits, shop):
    overview, decisions = visits.open(shop.url), visits.open(f"{shop.url}/decisions")
    overview.evaluate("window.isStillHere = true")
    decisions.evaluate("window.isStillHere = true")
    event = order()
    assert [shop.send(event), shop.send(event)] == ["delivered", "duplicate"]
    rows = row_of(decisions, event["id"])
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("duplicate")
    expect(rows.nth(0)).to_contain_text("redelivery")
    expect(rows.nth(1)).to_contain_text("delivered")
    expect(rows.nth(1)).not_to_contain_text("redelivery")
    expect(overview.locator("#causes")).to_contain_text("redelivery")
    expect(overview.locator("#routes")).to_contain_text("crm")
    for page in (overview, decisions):
        assert page.evaluate("window.isStillHere")  # nobody has loaded it again
        expect(page.locator("#live")).to_have_text("Live")
    assert shop.sink.has(event["detail"]["order"]) == 1


@pytest.mark.full
def test_an_arrival_is_found_by_id_conversation_key_topic_and_verdict(visits, shop):
    topic = f"Order {order()['id']}"
    event = order(**{"detail-type": topic})
    shop.send(event)
    shop.send(event)
    page = visits.open(f"{shop.url}/decisions")
    search = page.get_by_role("search")

    def found(text, verdict=""):
        search.get_by_label(re.compile("Envelope id")).fill(text)
        search.get_by_label("Verdict").select_option(verdict)
        search.get_by_role("button", name="Search").click()
        return page.locator("table.decisions tbody tr")

    expect(found(event["id"])).to_have_count(2)
    key = page.locator("table.decisions tbody tr a[href^='/events/']").first.get_attribute("title")
    for text in (event["detail"]["conversationId"], key, key[:12], topic):
        expect(found(text)).to_have_count(2)
    expect(found(topic, "duplicate")).to_have_count(1)
    expect(page.locator("table.decisions tbody tr")).to_contain_text("redelivery")
    expect(found(topic, "dead")).to_have_count(0)
    expect(page.locator("#arrivals")).to_contain_text("No matching arrival")
    search.get_by_label("Cause").select_option("redelivery")
    expect(found(topic)).to_have_count(1)
    page.get_by_role("link", name="Show all", exact=True).click()
    expect(page).to_have_url(f"{shop.url}/decisions")


@pytest.mark.full
def test_what_is_noisy_leads_to_its_arrivals(visits, shop):
    event = order()
    for _ in range(9):
        shop.send(event)
    conversation = event["detail"]["conversationId"]
    page = visits.open(shop.url)
    page.locator("#entities").get_by_role("link", name=conversation).click()
    expect(page.locator("table.decisions tbody tr")).to_have_count(9)
    page.go_back()
    page.locator("#topics").get_by_role("link", name="Order Placed").click()
    rows = page.locator("table.decisions tbody tr")
    expect(rows.first).to_contain_text("Order Placed")
    expect(rows.filter(has_not_text="Order Placed")).to_have_count(0)
    page.goto(shop.url)
    page.locator("#causes").get_by_role("link", name="redelivery").click()
    rows = page.locator("table.decisions tbody tr")
    expect(rows.first).to_contain_text("redelivery")
    expect(rows.filter(has_not_text="redelivery")).to_have_count(0)


def test_why_tells_rule_key_first_arrival_difference_cause_and_all_arrivals(visits, shop):
    event = order(**{"detail-type": "Order Status"})
    event["detail"] |= {"status": "packed", "box": "small"}
    again = {**event, "id": order()["id"], "detail": {**event["detail"], "box": "large"}}
    assert [shop.send(event), shop.send(again)] == ["delivered", "duplicate"]
    page = visits.open(f"{shop.url}/decisions?q={again['id']}")
    row_of(page, again["id"]).get_by_role("link", name="Why?").click()
    main = page.get_by_role("main")
    expect(main).to_contain_text("order status")
    expect(main.get_by_role("link", name="order status")).to_have_attribute(
        "href", re.compile("^/rules#")
    )
    for word in ("detail.order", "detail.status", "re-emission", event["id"], "First arrival"):
        expect(main).to_contain_text(word)
    differs = page.locator("section[aria-labelledby=differs]")
    page.wait_for_timeout(2_500)  # payloads are kept every two seconds
    page.reload()
    for word in ("box", "small", "large"):
        expect(differs).to_contain_text(word)
    line = page.locator("section[aria-labelledby=line]")
    expect(line).to_contain_text("(2)")
    expect(line).to_contain_text("delivered")
    expect(line).to_contain_text("duplicate")
    first = main.get_by_role("link", name="that arrival")
    first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(
        re.compile("delivered", re.IGNORECASE)
    )
    expect(page.get_by_role("main")).to_contain_text(event["id"])


@pytest.mark.full
def test_an_event_by_its_key_has_a_page_of_its_own(visits, shop):
    event = order()
    for _ in range(3):
        shop.send(event)
    page = visits.open(f"{shop.url}/decisions?q={event['id']}")
    page.locator("table.decisions tbody a[href^='/events/']").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Event")
    expect(page.locator("section[aria-labelledby=line]")).to_contain_text("(3)")


@pytest.mark.full
def test_what_there_is_not_is_said_plainly(visits, shop):
    page = visits.open(f"{shop.url}/decisions/nobody.7", allowed=("404",))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("main").get_by_role("link", name="Overview")).to_be_visible()
    page.goto(f"{shop.url}/nowhere")
    expect(page.get_by_role("main")).to_contain_text("Not found")
