"""Infrastructure as text: stacks, tables and policies, for CloudFormation and Terraform."""
