"""Why an event comes again, by what its arrivals have in common."""

import json
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from oncebridge.engine.causes import MEANINGS, Cause, Sighting, duplicate_cause
from oncebridge.events.event import parse

VARIANTS = Path(__file__).parents[1] / "events" / "variants"

FIRST = Sighting("i1", "shop", "123456789012", "us-east-1", "")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.REDELIVERY),
        ({"id": "i2"}, Cause.RE_EMISSION),
        ({"id": "i2", "source": "shop-2"}, Cause.SECOND_INTEGRATION),
        ({"id": "i2", "source": "shop-2", "region": "us-west-2"}, Cause.SECOND_INTEGRATION),
        ({"id": "i2", "region": "us-west-2"}, Cause.SECOND_BUS),
        ({"id": "i2", "account": "210987654321"}, Cause.SECOND_BUS),
        ({"replay": "r"}, Cause.REPLAY),
        ({"id": "i2", "source": "shop-2", "replay": "r"}, Cause.REPLAY),
        ({"id": ""}, Cause.UNKNOWN),
        ({"id": "", "source": "shop-2"}, Cause.SECOND_INTEGRATION),
        # what is left out is not another
        ({"id": "i2", "account": "", "region": ""}, Cause.RE_EMISSION),
        ({"id": "i2", "account": "", "region": "us-west-2"}, Cause.SECOND_BUS),
        ({"id": "i2", "source": ""}, Cause.RE_EMISSION),
    ],
)
def test_the_cause_is_told_by_what_differs(changes, cause):
    assert duplicate_cause(FIRST, replace(FIRST, **changes)) is cause


def test_a_copy_that_is_sent_again_is_a_redelivery_too():
    later = replace(FIRST, id="i2", source="shop-2")
    assert duplicate_cause(FIRST, later, id_was_seen=True) is Cause.REDELIVERY


def test_two_events_without_an_id_are_no_redelivery():
    nameless = replace(FIRST, id="")
    assert duplicate_cause(nameless, nameless) is Cause.UNKNOWN
    assert duplicate_cause(nameless, FIRST) is Cause.UNKNOWN


def test_within_one_replay_it_is_not_the_replay():
    replayed = replace(FIRST, replay="r")
    assert duplicate_cause(replayed, replayed) is Cause.REDELIVERY
    assert duplicate_cause(replayed, replace(replayed, id="i2")) is Cause.RE_EMISSION
    assert duplicate_cause(replayed, replace(replayed, replay="another")) is Cause.REPLAY
    assert duplicate_cause(replayed, FIRST) is Cause.REDELIVERY


def test_every_case_has_a_cause_and_every_cause_a_meaning():
    for case in product(["i1", "i2", ""], ["shop", "other"], ["a", ""], ["r", ""], ["p", ""]):
        assert duplicate_cause(FIRST, Sighting(*case)) in MEANINGS
    assert set(MEANINGS) == set(Cause)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("01_redelivery_same_envelope", Cause.REDELIVERY),
        ("02_archive_replay_replay-name", Cause.REPLAY),
        ("03_producer_reemission_new_id_time_timestamp", Cause.RE_EMISSION),
        ("04_producer_reemission_new_correlation_too", Cause.RE_EMISSION),
        ("05_second_integration_other_source_suffix", Cause.SECOND_INTEGRATION),
        ("06_second_integration_other_region", Cause.SECOND_INTEGRATION),
        ("07_same_event_reordered_keys", Cause.REDELIVERY),
    ],
)
def test_the_variants_of_one_event_have_the_causes_they_are_named_for(name, cause):
    first, later = (
        Sighting.of(parse((VARIANTS / f"{each}.json").read_bytes()))
        for each in ("00_original", name)
    )
    assert duplicate_cause(first, later) is cause


def test_a_sighting_has_nothing_for_what_the_envelope_has_not():
    assert Sighting.of(parse(json.dumps({"detail": {"n": 1}}).encode())) == Sighting(*[""] * 5)
