"""
Whether whoever runs oncebridge may do what it does, by IAM's own judgement.

IAM is asked what the policies of a user or role allow, action by action, for what is really in
the configuration. It is the caller that is asked about, unless another role is named: who runs
the check is often not whom the workers run as.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.needs import Grant, Resource
from oncebridge.check.aws.account import AwsLocation, NoSuchResource, NotReadable
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.policies import lets_principal
from oncebridge.check.aws.queues import SqsQueue
from oncebridge.check.finding import Severity

_UNKNOWN_END: Final = "-??????"
"""So ends a secret of which only the name is known."""
_WHAT: Final = "whether it may do all that is needed"


class Principal(Struct, frozen=True):
    """Who is asked about."""

    arn: str
    account: str
    region: str

    @property
    def subject(self) -> str:
        return f"rights of {self.arn}"

    @property
    def partition(self) -> str:
        return self.arn.split(":")[1]

    def arn_of(self, resource: Resource) -> str:
        """Write the ARN of a resource; what its address does not say is as here."""
        partition = resource.partition or self.partition
        if resource.service == "s3":
            return f"arn:{partition}:s3:::{resource.name}"
        region, account = resource.region or self.region, resource.account or self.account
        return f"arn:{partition}:{resource.service}:{region}:{account}:{resource.name}"


async def caller(context: AwsContext, where: AwsLocation) -> Principal | None:
    """Find out who is asking; of an assumed role, which role that is."""
    sts = context.at("sts", where)
    asked = sts.ask("GetCallerIdentity")
    found = await context.look_if_exists("rights", "who is asking", asked)
    if found is None:
        return None
    arn = str(found.get("Arn", ""))
    kind, _, name = arn.partition(":sts:")[2].partition(":")[2].partition("/")
    if kind.endswith("assumed-role"):
        arn = await _role(context, arn, name.partition("/")[0], where)
    return Principal(arn, str(found.get("Account", "")), await sts.region())


async def _role(context: AwsContext, arn: str, name: str, where: AwsLocation) -> str:
    """Return the ARN of a role; a session does not tell its path, so IAM is asked for it."""
    try:
        found = await context.at("iam", where).ask("GetRole", RoleName=name)
        return str(found["Role"]["Arn"])
    except (NotReadable, NoSuchResource):
        _, partition, _, _, account, _ = arn.split(":", 5)
        return f"arn:{partition}:iam::{account}:role/{name}"


async def check_rights(
    context: AwsContext,
    who: Principal,
    grants: Sequence[Grant],
    seen: Mapping[str, SqsQueue],
    where: AwsLocation,
) -> None:
    """Have IAM say whether *who* may do all of *grants*; *seen* are queues by their ARNs."""
    if who.arn.endswith(":root"):
        context.report_passed(who.subject, "the owner of the account may do everything")
        return
    if ":federated-user/" in who.arn or ":iam:" not in who.arn:
        context.report_not_checked(who.subject, _WHAT, "the ARN of a user or role: --role ARN")
        return
    asked = [(who.arn_of(grant.resource), ACTIONS[grant.what]) for grant in grants]
    answers = await context.run_all(
        [
            partial(_denied, who=who, actions=actions, resource=resource, where=where)
            for resource, actions in asked
        ]
    )
    is_clear = True
    for (resource, _), denied in zip(asked, answers, strict=True):
        for one in denied or ():
            if one.is_lack and _by_queue(seen, who, one.action, resource):
                continue
            is_clear = False
            _report_denial(context, who, one, resource)
        is_clear = is_clear and denied is not None
    if is_clear:
        context.report_passed(who.subject, "it may do all that is needed")


def _by_queue(seen: Mapping[str, SqsQueue], who: Principal, action: str, resource: str) -> bool:
    """Return whether the policy of the queue itself allows it, which is enough in one account."""
    queue = seen.get(resource)
    return queue is not None and lets_principal(
        queue.policy, arn=who.arn, action=action, resource=resource
    )


class _Denial(Struct, frozen=True):
    """An action that is denied, and by what."""

    action: str
    told: Mapping[str, Any]

    @property
    def by_organisation(self) -> bool:
        decided = self.told.get("OrganizationsDecisionDetail") or {}
        return decided.get("AllowedByOrganizations") is False

    @property
    def by_boundary(self) -> bool:
        decided = self.told.get("PermissionsBoundaryDecisionDetail") or {}
        return decided.get("AllowedByPermissionsBoundary") is False

    @property
    def is_lack(self) -> bool:
        """Whether nothing is missing but that it is allowed."""
        is_limited = self.by_organisation or self.by_boundary
        return self.told.get("EvalDecision") != "explicitDeny" and not is_limited


async def _denied(
    context: AwsContext, who: Principal, actions: Sequence[str], resource: str, where: AwsLocation
) -> list[_Denial] | None:
    """List what is denied, and how; None where IAM does not say."""
    asked = context.at("iam", where).ask_all(
        "SimulatePrincipalPolicy",
        "EvaluationResults",
        PolicySourceArn=who.arn,
        ActionNames=list(actions),
        ResourceArns=[resource],
    )
    try:
        found: list[Any] | None = await context.look(who.subject, _WHAT, asked)
    except NoSuchResource:
        context.report_not_checked(
            who.subject, _WHAT, "the ARN of a user or role that is there: --role ARN"
        )
        return None
    if found is None:
        return None
    denied: list[_Denial] = []
    for one in found:
        action, decision = str(one["EvalActionName"]), str(one["EvalDecision"])
        if decision == "allowed":
            continue
        if unknown := one.get("MissingContextValues"):
            # It hangs on what only a real call brings along.
            what, names = f"whether it may {action} on {resource}", ", ".join(sorted(unknown))
            context.report_not_checked(
                who.subject, what, f"a real call: its policies look at {names}"
            )
        else:
            denied.append(_Denial(action, one))
    return denied


def _report_denial(context: AwsContext, who: Principal, denied: _Denial, resource: str) -> None:
    if denied.is_lack and resource.endswith(_UNKNOWN_END):
        # The policy may well name it in full, which we cannot.
        what = f"whether it may {denied.action} on {resource}"
        context.report_not_checked(
            who.subject, what, "the whole ARN of the secret, in place of its name"
        )
        return
    how, fix = _reason(denied)
    context.report(
        "rights-missing",
        Severity.ERROR,
        who.subject,
        seen=f"{how} {denied.action} on {resource}",
        why="oncebridge is refused when it does this: it does not start, or hands events back.",
        fix=fix,
    )


def _reason(denied: _Denial) -> tuple[str, str]:
    """Say what denies it, and what helps."""
    if denied.by_organisation:
        return (
            "a policy of the organisation (SCP) does not allow",
            "Have whoever runs the organisation allow it for this account; no role's policy can.",
        )
    if denied.by_boundary:
        return (
            "its permissions boundary does not allow",
            "Add it to the policy that is the boundary: what is attached besides cannot exceed it.",
        )
    if denied.is_lack:
        return (
            "no policy allows",
            "Attach what this prints to it:\noncebridge template iam -c oncebridge.toml",
        )
    return (
        "a policy denies",
        "Find the statement with Effect Deny, and take the action or resource out of it.",
    )
