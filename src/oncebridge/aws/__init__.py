"""
AWS, without the SDK's requests.

Credentials, Regions and endpoints are botocore's to find, as everywhere else on AWS. The
requests are our own: the SDK spends five to forty times the processor time on each.
"""
