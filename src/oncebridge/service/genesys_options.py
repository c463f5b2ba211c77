"""What can be set about Genesys Cloud."""

from datetime import timedelta
from typing import Annotated, Literal

from msgspec import Struct

from oncebridge.base.options import Doc, Rate
from oncebridge.base.secrets import Secret
from oncebridge.events.key import Scope


class GenesysOptions(Struct, frozen=True, kw_only=True):
    """The preset's own settings, and the account with which conversations are looked up."""

    sources: Annotated[
        tuple[str, ...],
        Doc(
            "How the sources begin whose events the preset's rules are for.",
            example='["aws.partner/genesys.com/", "com.example.genesys"]',
        ),
    ] = ("aws.partner/genesys.com/", "aws.partner/genesys.com.test/")
    scope: Annotated[
        Scope,
        Doc('"organisation" takes all integrations of one organisation for one source.'),
    ] = "organisation"
    region: Annotated[
        str | None,
        Doc(
            "Where the organisation lives, as AWS names it, or the host of its API without `api.`; "
            "a whole URL, such as a proxy's, is for logins and look-ups both.",
            example="eu-central-1",
        ),
    ] = None
    client_id: Annotated[Secret | None, Doc("The id of an OAuth client.", "env:GENESYS_ID")] = None
    client_secret: Annotated[Secret | None, Doc("Its secret.", "env:GENESYS_SECRET")] = None
    conversation: Annotated[
        str | None,
        Doc(
            "Where the id of the conversation is, in JMESPath, if not where Genesys puts it.",
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
        Doc("What to do while nobody can say: keep the event back, or send it unverified."),
    ] = "hold"
    settle: Annotated[
        timedelta,
        Doc("How long a conversation may be unknown after its event, and come yet.", "30s"),
    ] = timedelta(seconds=30)
    remember: Annotated[
        timedelta, Doc("How long it is remembered that a conversation exists.", "1h")
    ] = timedelta(hours=1)
    lookups: Annotated[
        Rate,
        Doc(
            "How many conversations this process looks up at most; Genesys allows a client 300 a "
            "minute, over all processes.",
            example="2/s",
        ),
    ] = Rate(4)
    timeout: Annotated[
        timedelta,
        Doc("How long one request may take; at most half of sink_timeout.", "3s", at_least=0.1),
    ] = timedelta(seconds=3)
