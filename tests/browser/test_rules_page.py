"""The rules on the page: what is configured, what each matched, and the box to try an event."""

import json

import pytest
from playwright.sync_api import expect
from tests.browser.towns import order, site

from oncebridge.base.secrets import mask_address

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with site(tmp_path_factory.mktemp("rules")) as running:
        yield running


def test_each_rule_tells_what_it_is_and_what_it_matched(visits, shop):
    event = order(**{"detail-type": "Order Status"})
    event["detail"]["status"] = "sent"
    shop.send(event)
    shop.send(event)
    page = visits.open(f"{shop.url}/rules")
    rule = page.locator(".rule").filter(has_text="order status").last
    for _ in range(40):  # counts are read once a second, and this page does not follow them
        if "duplicate" in (rule.text_content() or ""):
            break
        page.wait_for_timeout(500)
        page.reload()
    for word in ("detail.order", "detail.status", "com.example.shop", "delivered", "duplicate"):
        expect(rule).to_contain_text(word)
    expect(page.get_by_role("main")).to_contain_text(mask_address(shop.sink.url))


def test_an_event_is_tried_and_nothing_is_changed(visits, shop):
    event = order(**{"detail-type": "Order Status"})
    event["detail"]["status"] = "sent"
    page = visits.open(f"{shop.url}/rules")

    def tried(text):
        page.get_by_label("Event", exact=True).fill(text)
        page.get_by_role("button", name="Try").click()
        return page.locator("#result")

    result = tried(json.dumps(event))
    expect(result).to_contain_text("order status")
    expect(result).to_contain_text("delivered")
    expect(page.get_by_label("Event", exact=True)).to_have_value(json.dumps(event))
    assert not shop.sink.has(event["detail"]["order"])
    assert shop.send(event) == "delivered"  # nothing was claimed
    expect(tried(json.dumps(event))).to_contain_text("duplicate")
    again = {**event, "id": "another"}
    expect(tried(f"{json.dumps(event)}\n{json.dumps(again)}")).to_contain_text("2 records")
    expect(tried("no event at all {")).to_contain_text("not")
