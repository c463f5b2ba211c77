"""The settings for Genesys Cloud."""

from datetime import timedelta
from typing import Annotated, Literal

from msgspec import Struct

from oncebridge.base.options import Doc, Rate
from oncebridge.base.secrets import Secret
from oncebridge.events.key import Scope


class GenesysOptions(Struct, frozen=True, kw_only=True):
    """The settings of the preset, and the OAuth client that looks up conversations."""

    sources: Annotated[
        tuple[str, ...],
        Doc(
            "Prefixes of the sources whose events the rules of the preset are for.",
            example='["aws.partner/genesys.com/", "com.example.genesys"]',
        ),
    ] = ("aws.partner/genesys.com/", "aws.partner/genesys.com.test/")
    scope: Annotated[
        Scope,
        Doc('"organisation" treats all integrations of one organisation as one source.'),
    ] = "organisation"
    region: Annotated[
        str | None,
        Doc(
            "The AWS Region of the organisation, or the host of its API without `api.`; a whole URL, "
            "such as that of a proxy, is used for both logins and look-ups.",
            example="eu-central-1",
        ),
    ] = None
    client_id: Annotated[Secret | None, Doc("The id of the OAuth client.", "env:GENESYS_ID")] = None
    client_secret: Annotated[Secret | None, Doc("Its secret.", "env:GENESYS_SECRET")] = None
    conversation: Annotated[
        str | None,
        Doc(
            "A JMESPath expression for the id of the conversation, if it is not where Genesys puts it.",
            example="detail.eventBody.conversationId || detail.conversation_id",
        ),
    ] = None
    on_unknown: Annotated[
        Literal["dead", "deliver"],
        Doc("What to do with an event whose conversation does not exist."),
    ] = "dead"
    on_unnamed: Annotated[
        Literal["deliver", "dead"],
        Doc("What to do with an event that names no conversation."),
    ] = "deliver"
    on_api_outage: Annotated[
        Literal["hold", "deliver"],
        Doc("What to do while the API is unavailable: hold the event, or deliver it unverified."),
    ] = "hold"
    settle: Annotated[
        timedelta,
        Doc("How long after its event a conversation may still be unknown to the API.", "30s"),
    ] = timedelta(seconds=30)
    remember: Annotated[timedelta, Doc("How long a known conversation is remembered.", "1h")] = (
        timedelta(hours=1)
    )
    lookups: Annotated[
        Rate,
        Doc(
            "The rate of look-ups by this process; Genesys allows 300 a minute per client, for all "
            "processes together.",
            example="2/s",
        ),
    ] = Rate(4)
    timeout: Annotated[
        timedelta,
        Doc("How long one request may take; at most half of sink_timeout.", "3s", at_least=0.1),
    ] = timedelta(seconds=3)
