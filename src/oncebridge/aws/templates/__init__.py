"""Infrastructure as text: stacks, tables and policies, for CloudFormation and Terraform."""

from oncebridge.aws.templates.access import ACTIONS as ALL_ACTIONS
from oncebridge.aws.templates.needs import needed
from oncebridge.aws.templates.policies import Known, policy
from oncebridge.aws.templates.stacks import stack
from oncebridge.aws.templates.tables import ACTIONS, table

__all__ = ["ACTIONS", "ALL_ACTIONS", "Known", "needed", "policy", "stack", "table"]
