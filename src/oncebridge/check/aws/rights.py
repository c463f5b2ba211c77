"""
Check the IAM rights that oncebridge needs, with IAM's policy simulator.

IAM is asked about each action on each resource of the configuration, for the caller or for another
role: the workers often run as another role than the check.
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
from oncebridge.check.aws.queues import QueueDescription
from oncebridge.check.finding import Severity

_UNKNOWN_END: Final = "-??????"
"""The end of a secret's ARN if only its name is known."""
_WHAT: Final = "whether it has all rights that are needed"


class Principal(Struct, frozen=True):
    """The user or role whose rights are checked."""

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
        """Return the ARN of a resource; account and Region are ours if its address has none."""
        partition = resource.partition or self.partition
        if resource.service == "s3":
            return f"arn:{partition}:s3:::{resource.name}"
        region, account = resource.region or self.region, resource.account or self.account
        return f"arn:{partition}:{resource.service}:{region}:{account}:{resource.name}"


async def caller(context: AwsContext, where: AwsLocation) -> Principal | None:
    """Return the caller; for an assumed role, that role."""
    sts = context.at("sts", where)
    asked = sts.ask("GetCallerIdentity")
    found = await context.look_if_exists("rights", "the caller", asked)
    if found is None:
        return None
    arn = str(found.get("Arn", ""))
    kind, _, name = arn.partition(":sts:")[2].partition(":")[2].partition("/")
    if kind.endswith("assumed-role"):
        arn = await _role(context, arn, name.partition("/")[0], where)
    return Principal(arn, str(found.get("Account", "")), await sts.region())


async def _role(context: AwsContext, arn: str, name: str, where: AwsLocation) -> str:
    """Return the ARN of a role; IAM is asked, since the ARN of a session has no path."""
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
    seen: Mapping[str, QueueDescription],
    where: AwsLocation,
) -> None:
    """Check whether *who* has all of *grants*; *seen* are queues by their ARNs."""
    if who.arn.endswith(":root"):
        context.report_passed(who.subject, "the root user has all rights")
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
        context.report_passed(who.subject, "it has all rights that are needed")


def _by_queue(
    seen: Mapping[str, QueueDescription], who: Principal, action: str, resource: str
) -> bool:
    """Return whether the policy of the queue allows it, which is enough in one account."""
    queue = seen.get(resource)
    return queue is not None and lets_principal(
        queue.policy, arn=who.arn, action=action, resource=resource
    )


class _Denial(Struct, frozen=True):
    """An action that is denied, and the reason."""

    action: str
    result: Mapping[str, Any]

    @property
    def by_organisation(self) -> bool:
        decided = self.result.get("OrganizationsDecisionDetail") or {}
        return decided.get("AllowedByOrganizations") is False

    @property
    def by_boundary(self) -> bool:
        decided = self.result.get("PermissionsBoundaryDecisionDetail") or {}
        return decided.get("AllowedByPermissionsBoundary") is False

    @property
    def is_lack(self) -> bool:
        """Whether a policy that allows it would be enough."""
        is_limited = self.by_organisation or self.by_boundary
        return self.result.get("EvalDecision") != "explicitDeny" and not is_limited


async def _denied(
    context: AwsContext, who: Principal, actions: Sequence[str], resource: str, where: AwsLocation
) -> list[_Denial] | None:
    """Return the denied actions; None if IAM does not answer."""
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
            who.subject, _WHAT, "the ARN of an existing user or role: --role ARN"
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
            # It depends on the context of a real call.
            what, names = f"whether it may {action} on {resource}", ", ".join(sorted(unknown))
            context.report_not_checked(
                who.subject, what, f"a real call: its policies depend on {names}"
            )
        else:
            denied.append(_Denial(action, one))
    return denied


def _report_denial(context: AwsContext, who: Principal, denied: _Denial, resource: str) -> None:
    if denied.is_lack and resource.endswith(_UNKNOWN_END):
        # The policy may contain the whole ARN, which we do not know.
        what = f"whether it may {denied.action} on {resource}"
        context.report_not_checked(
            who.subject, what, "the whole ARN of the secret instead of its name"
        )
        return
    how, fix = _reason(denied)
    context.report(
        "rights-missing",
        Severity.ERROR,
        who.subject,
        seen=f"{how} {denied.action} on {resource}",
        why="AWS denies this call: oncebridge does not start, or returns events to the source.",
        fix=fix,
    )


def _reason(denied: _Denial) -> tuple[str, str]:
    """Return what denies it, and the fix."""
    if denied.by_organisation:
        return (
            "a policy of the organisation (SCP) does not allow",
            "Ask the administrators of the organisation to allow it; no policy of the role can.",
        )
    if denied.by_boundary:
        return (
            "its permissions boundary does not allow",
            "Add it to the policy of the boundary: attached policies cannot exceed it.",
        )
    if denied.is_lack:
        return (
            "no policy allows",
            "Attach the policy that this command prints:\noncebridge template iam -c oncebridge.toml",
        )
    return (
        "a policy denies",
        "Find the statement with Effect Deny, and remove the action or resource from it.",
    )
