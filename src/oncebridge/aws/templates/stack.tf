#: lambda
# oncebridge: EventBridge rule, queue, Lambda function and table; each event delivered once.
#: worker
# oncebridge: EventBridge rule, queue and table, and the rights of the workers that read it.
#: both
# A module: keep it in a folder of its own.

variable "name" {
  description = "What the queue, the table and all the rest are called, or begin with."
  type        = string
  default     = "@name@"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{2,47}$", var.name))
    error_message = "A name is 3 to 48 letters, digits, _ and -."
  }
}

variable "organization_id" {
  description = "The id of your organization in Genesys Cloud."
  type        = string
  default     = ""
}

variable "event_source_suffix" {
  description = "The event source suffix of the Amazon EventBridge integration in Genesys Cloud."
  type        = string
  default     = ""
}

variable "topic_prefix" {
  description = "Where no topics are listed, all that begin so."
  type        = string
  default     = "v2."
}

variable "topics" {
  description = "Only these topics, such as v2.detail.events.conversation.{id}.acd.end."
  type        = list(string)
  default     = []
}

variable "event_bus_name" {
  description = "Another bus than that of Genesys Cloud."
  type        = string
  default     = ""
}

variable "event_source" {
  description = "Another source of events than that of Genesys Cloud."
  type        = string
  default     = ""
}

variable "create_event_bus" {
  description = "Whether to make the bus of the Genesys Cloud event source; no, if it is there."
  type        = bool
  default     = false
}

#: lambda
variable "sink" {
  description = "Where events go, such as https://crm.example.com/hooks/genesys, sqs:ARN, events:ARN, sns:ARN or kinesis:ARN."
  type        = string
  default     = ""
}

variable "sink_secret_arn" {
  description = "A secret of Secrets Manager that is sent to an HTTP sink as its Authorization."
  type        = string
  default     = ""
}

#: worker
variable "sink_secret_arn" {
  description = "A secret of Secrets Manager that the configuration refers to."
  type        = string
  default     = ""
}

#: both
variable "sink_arn" {
  description = "For a sink on AWS (a bus, a queue, a topic, a stream), its ARN."
  type        = string
  default     = ""
}

#: lambda
variable "config_parameter" {
  description = "A parameter of SSM that holds an oncebridge.toml, such as /oncebridge/config. What is set here wins."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(/[A-Za-z0-9._/-]+)?$", var.config_parameter))
    error_message = "The name of the parameter begins with /."
  }
}

variable "preset" {
  description = "The rules for Genesys Cloud events (genesys), or none but those of config_parameter."
  type        = string
  default     = "genesys"
}

variable "route" {
  description = "Under which name it is remembered what was passed on. Another name begins anew."
  type        = string
  default     = "events"
}

variable "window" {
  description = "How long an event is remembered."
  type        = string
  default     = "6d"
}

variable "mode" {
  description = "enforce; or shadow, which forwards everything and only counts what would have been dropped."
  type        = string
  default     = "enforce"
}

variable "code_bucket" {
  description = "The bucket with the code of the function."
  type        = string
}

variable "code_key" {
  description = "The zip file in that bucket."
  type        = string
}

variable "code_version" {
  description = "Its version, in a bucket with versions."
  type        = string
  default     = null
}

variable "architecture" {
  description = "What the zip file was built for: arm64 or x86_64."
  type        = string
  default     = "arm64"
}

variable "memory" {
  description = "Of the function, in MB; its share of a CPU grows with it."
  type        = number
  default     = 512
}

variable "timeout" {
  description = "Of the function, in seconds. The visibility timeout of the queue follows from it."
  type        = number
  default     = 60

  validation {
    condition     = var.timeout >= 30 && var.timeout <= 900
    error_message = "Between 30 and 900 seconds."
  }
}

variable "trigger" {
  description = "How events reach the function: queue or direct. Direct is for few events, which may wait for minutes when something is down."
  type        = string
  default     = "queue"

  validation {
    condition     = contains(["queue", "direct"], var.trigger)
    error_message = "Either queue or direct."
  }
}

variable "batch_size" {
  description = "How many messages the function is handed at most; more than 10 need a batch_window."
  type        = number
  default     = 10
}

variable "batch_window" {
  description = "How long messages may wait for more of them, in seconds."
  type        = number
  default     = 0
}

variable "max_concurrency" {
  description = "How many of the function may work on the queue at once."
  type        = number
  default     = 10
}

variable "reserved_concurrency" {
  description = "How many may run at all, taken out of those of the account; not less than max_concurrency. -1: as many as there are."
  type        = number
  default     = -1
}

variable "log_retention" {
  description = "How many days the log is kept. No event is ever written to it."
  type        = number
  default     = 30
}

#: worker
variable "runs_on" {
  description = "Who may take the role: ecs, ec2, pod-identity or irsa. Elsewhere makes none, only the policy to attach to yours."
  type        = string
  default     = "ecs"

  validation {
    condition     = contains(["ecs", "ec2", "pod-identity", "irsa", "elsewhere"], var.runs_on)
    error_message = "One of ecs, ec2, pod-identity, irsa, elsewhere."
  }
}

variable "oidc_provider_arn" {
  description = "For irsa, the OIDC provider of the EKS cluster."
  type        = string
  default     = ""
}

variable "service_account" {
  description = "For irsa, namespace and name of the service account of the workers."
  type        = string
  default     = "oncebridge:oncebridge"
}

variable "visibility_timeout" {
  description = "After how many seconds a message of a worker that died comes again; longer than the lease of oncebridge."
  type        = number
  default     = 120

  validation {
    condition     = var.visibility_timeout >= 60
    error_message = "At least 60 seconds."
  }
}

#: both
variable "max_receive_count" {
  description = "How often a message may come back before it is set aside. oncebridge sets aside what is broken much sooner."
  type        = number
  default     = 100

  validation {
    condition     = var.max_receive_count >= @receives@ && var.max_receive_count <= 1000
    error_message = "Between @receives@ and 1000."
  }
}

variable "kms_key_arn" {
  description = "A key to encrypt the queues with, in place of SQS's own. Its policy must let events.amazonaws.com use it."
  type        = string
  default     = ""
}

variable "alarm_topic_arn" {
  description = "An SNS topic that is told when something needs you."
  type        = string
  default     = ""
}

variable "alarm_age" {
  description = "After how many seconds a waiting message is an alarm."
  type        = number
  default     = 900
}

variable "deletion_protection" {
  description = "Whether the table refuses to be deleted. Without it, events of the last days would count as new."
  type        = bool
  default     = true
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

locals {
  partner  = "aws.partner/genesys.com/cloud/${var.organization_id}/${var.event_source_suffix}"
  bus      = var.event_bus_name == "" ? local.partner : var.event_bus_name
  source   = var.event_source == "" ? local.partner : var.event_source
  tell     = var.alarm_topic_arn == "" ? [] : [var.alarm_topic_arn]
  kms_key  = var.kms_key_arn == "" ? null : var.kms_key_arn
  sqs_key  = var.kms_key_arn == "" ? true : null
  rule_arn = "arn:${data.aws_partition.current.partition}:events:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:rule/${local.bus == "default" ? "" : "${local.bus}/"}${var.name}"

  only_by_tls = {
    Sid       = "OnlyByTls"
    Effect    = "Deny"
    Principal = "*"
    Action    = "sqs:*"
    Condition = { Bool = { "aws:SecureTransport" = "false" } }
  }

  # What is done to a sink, by its service.
  sinks = {
    events = [
      "@sink.events@",
    ]
    sqs = [
      "@sink.sqs@",
    ]
    sns = [
      "@sink.sns@",
    ]
    kinesis = [
      "@sink.kinesis@",
    ]
  }

  # What depends on what was given.
  rights = concat(
    var.sink_arn == "" ? [] : [{
      Sid      = "Sink"
      Effect   = "Allow"
      Action   = local.sinks[split(":", var.sink_arn)[2]]
      Resource = var.sink_arn
    }],
    var.sink_secret_arn == "" ? [] : [{
      Sid      = "Secret"
      Effect   = "Allow"
      Action   = ["secretsmanager:GetSecretValue"]
      Resource = var.sink_secret_arn
    }],
    var.kms_key_arn == "" ? [] : [{
      Sid    = "Key"
      Effect = "Allow"
      Action = [
        "@key.kms@",
      ]
      Resource = var.kms_key_arn
    }],
#: lambda
    var.config_parameter == "" ? [] : [{
      Sid      = "Config"
      Effect   = "Allow"
      Action   = ["ssm:GetParameter"]
      Resource = "arn:${data.aws_partition.current.partition}:ssm:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:parameter${var.config_parameter}"
    }],
    var.trigger == "queue" ? [] : [{
      Sid      = "Failed"
      Effect   = "Allow"
      Action   = ["sqs:SendMessage"]
      Resource = aws_sqs_queue.failed.arn
    }],
#: both
  )
}

# --- in: the rule, and what it cannot deliver -----------------------------------------------

resource "aws_cloudwatch_event_bus" "genesys" {
  count             = var.create_event_bus ? 1 : 0
  name              = local.partner
  event_source_name = local.partner
}

resource "aws_cloudwatch_event_rule" "oncebridge" {
  name           = var.name
  description    = "Events for oncebridge."
  event_bus_name = var.create_event_bus ? aws_cloudwatch_event_bus.genesys[0].name : local.bus

  event_pattern = length(var.topics) == 0 ? jsonencode({
    source      = [local.source]
    detail-type = [{ prefix = var.topic_prefix }]
    }) : jsonencode({
    source      = [local.source]
    detail-type = var.topics
  })

  lifecycle {
    precondition {
      condition     = var.event_bus_name != "" || (var.organization_id != "" && var.event_source_suffix != "")
      error_message = "Give organization_id and event_source_suffix of Genesys Cloud, or event_bus_name."
    }
    precondition {
      condition     = var.event_bus_name == "" || var.event_source != ""
      error_message = "With event_bus_name, give the event_source of its events too."
    }
    precondition {
      condition     = var.event_bus_name == "" || !var.create_event_bus
      error_message = "create_event_bus makes that of Genesys Cloud; leave out event_bus_name."
    }
  }
}

resource "aws_cloudwatch_event_target" "oncebridge" {
  rule           = aws_cloudwatch_event_rule.oncebridge.name
  event_bus_name = aws_cloudwatch_event_rule.oncebridge.event_bus_name
  target_id      = "oncebridge"
#: lambda
  arn            = var.trigger == "queue" ? aws_sqs_queue.queue.arn : aws_lambda_function.oncebridge.arn
#: worker
  arn            = aws_sqs_queue.queue.arn
#: both

  retry_policy {
    maximum_event_age_in_seconds = 86400
    maximum_retry_attempts       = 185
  }

  dead_letter_config {
    arn = aws_sqs_queue.undelivered.arn
  }

  # What came before the queues may be written to would be lost.
  depends_on = [
    aws_sqs_queue_policy.queue,
    aws_sqs_queue_policy.undelivered,
#: lambda
    aws_lambda_permission.rule,
#: both
  ]
}

resource "aws_sqs_queue" "undelivered" {
  name                      = "${var.name}-undelivered"
  message_retention_seconds = 1209600
  kms_master_key_id         = local.kms_key
  sqs_managed_sse_enabled   = local.sqs_key
}

resource "aws_sqs_queue_policy" "undelivered" {
  queue_url = aws_sqs_queue.undelivered.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyTheRule"
      Effect    = "Allow"
      Principal = { Service = "events.amazonaws.com" }
      Action    = "sqs:SendMessage"
      Resource  = aws_sqs_queue.undelivered.arn
      Condition = { ArnEquals = { "aws:SourceArn" = local.rule_arn } }
    }, merge(local.only_by_tls, { Resource = aws_sqs_queue.undelivered.arn })]
  })
}

# --- the queue ------------------------------------------------------------------------------

#: lambda
# A message is hidden for six times the timeout, as AWS asks for, and while it waits for others.
#: both
resource "aws_sqs_queue" "queue" {
  name                       = var.name
  message_retention_seconds  = 345600
  receive_wait_time_seconds  = 20
#: lambda
  visibility_timeout_seconds = 6 * var.timeout + var.batch_window
#: worker
  visibility_timeout_seconds = var.visibility_timeout
#: both
  kms_master_key_id          = local.kms_key
  sqs_managed_sse_enabled    = local.sqs_key

  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.failed.arn
    maxReceiveCount     = var.max_receive_count
  })
}

resource "aws_sqs_queue_policy" "queue" {
  queue_url = aws_sqs_queue.queue.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyTheRule"
      Effect    = "Allow"
      Principal = { Service = "events.amazonaws.com" }
      Action    = "sqs:SendMessage"
      Resource  = aws_sqs_queue.queue.arn
      Condition = { ArnEquals = { "aws:SourceArn" = local.rule_arn } }
    }, merge(local.only_by_tls, { Resource = aws_sqs_queue.queue.arn })]
  })
}

# What came back too often. A message keeps the age it had: so this is longer than the queue's.
resource "aws_sqs_queue" "failed" {
  name                      = "${var.name}-failed"
  message_retention_seconds = 1209600
  kms_master_key_id         = local.kms_key
  sqs_managed_sse_enabled   = local.sqs_key
}

resource "aws_sqs_queue_redrive_allow_policy" "failed" {
  queue_url = aws_sqs_queue.failed.id

  redrive_allow_policy = jsonencode({
    redrivePermission = "byQueue"
    sourceQueueArns   = [aws_sqs_queue.queue.arn]
  })
}

# --- what oncebridge remembers, and what it could not pass on --------------------------------

resource "aws_dynamodb_table" "oncebridge" {
  name                        = var.name
  billing_mode                = "PAY_PER_REQUEST"
  deletion_protection_enabled = var.deletion_protection
  hash_key                    = "k"

  attribute {
    name = "k"
    type = "B"
  }

  ttl {
    attribute_name = "x"
    enabled        = true
  }

  point_in_time_recovery {
    enabled = true
  }
}

resource "aws_sqs_queue" "dead" {
  name                      = "${var.name}-dead"
  message_retention_seconds = 1209600
  kms_master_key_id         = local.kms_key
  sqs_managed_sse_enabled   = local.sqs_key
}

resource "aws_sqs_queue_policy" "by_tls" {
  for_each = {
    failed = aws_sqs_queue.failed
    dead   = aws_sqs_queue.dead
  }

  queue_url = each.value.id

  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [merge(local.only_by_tls, { Resource = each.value.arn })]
  })
}

#: lambda
# --- the function ---------------------------------------------------------------------------

resource "aws_lambda_function" "oncebridge" {
  function_name                  = var.name
  description                    = "oncebridge: each event delivered once."
  handler                        = "oncebridge.aws.function.handler"
  runtime                        = "python3.12"
  architectures                  = [var.architecture]
  role                           = aws_iam_role.oncebridge.arn
  timeout                        = var.timeout
  memory_size                    = var.memory
  reserved_concurrent_executions = var.reserved_concurrency
  s3_bucket                      = var.code_bucket
  s3_key                         = var.code_key
  s3_object_version              = var.code_version

  environment {
    variables = merge(
      {
        ONCEBRIDGE_STORE  = "dynamodb://${aws_dynamodb_table.oncebridge.name}?region=${data.aws_region.current.name}"
        ONCEBRIDGE_DEAD   = "sqs:${aws_sqs_queue.dead.url}"
        ONCEBRIDGE_PRESET = var.preset
        ONCEBRIDGE_WINDOW = var.window
        ONCEBRIDGE_MODE   = var.mode
      },
      var.sink == "" ? {} : { ONCEBRIDGE_SINK = var.sink, ONCEBRIDGE_ROUTE = var.route },
      var.config_parameter == "" ? {} : { ONCEBRIDGE_CONFIG = "ssm:${var.config_parameter}" },
      var.sink_secret_arn == "" ? {} : {
        ONCEBRIDGE_SINK__HEADERS__AUTHORIZATION = "secretsmanager:${var.sink_secret_arn}"
      },
    )
  }

  lifecycle {
    precondition {
      condition     = var.sink != "" || var.config_parameter != ""
      error_message = "Give the sink, or a config_parameter that names one."
    }
  }

  depends_on = [aws_cloudwatch_log_group.oncebridge, aws_iam_role_policy.oncebridge]
}

resource "aws_cloudwatch_log_group" "oncebridge" {
  name              = "/aws/lambda/${var.name}"
  retention_in_days = var.log_retention
}

resource "aws_lambda_event_source_mapping" "oncebridge" {
  event_source_arn                   = aws_sqs_queue.queue.arn
  function_name                      = aws_lambda_function.oncebridge.arn
  batch_size                         = var.batch_size
  maximum_batching_window_in_seconds = var.batch_window
  # Without it the answer is not looked at, and what failed is deleted.
  function_response_types = ["ReportBatchItemFailures"]

  scaling_config {
    maximum_concurrency = var.max_concurrency
  }
}

resource "aws_lambda_permission" "rule" {
  count         = var.trigger == "direct" ? 1 : 0
  function_name = aws_lambda_function.oncebridge.function_name
  action        = "lambda:InvokeFunction"
  principal     = "events.amazonaws.com"
  source_arn    = local.rule_arn
}

resource "aws_lambda_function_event_invoke_config" "oncebridge" {
  count                        = var.trigger == "direct" ? 1 : 0
  function_name                = aws_lambda_function.oncebridge.function_name
  maximum_event_age_in_seconds = 21600
  maximum_retry_attempts       = 2

  destination_config {
    on_failure {
      destination = aws_sqs_queue.failed.arn
    }
  }
}

resource "aws_iam_role" "oncebridge" {
  name_prefix = "${substr(var.name, 0, 30)}-"

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy" "oncebridge" {
  name = "oncebridge"
  role = aws_iam_role.oncebridge.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat([
      {
        Sid    = "Log"
        Effect = "Allow"
        Action = [
          "@function.logs@",
        ]
        Resource = "${aws_cloudwatch_log_group.oncebridge.arn}:*"
      },
      {
        Sid    = "Queue"
        Effect = "Allow"
        Action = [
          "@function.sqs@",
        ]
        Resource = aws_sqs_queue.queue.arn
      },
      {
        Sid    = "Remember"
        Effect = "Allow"
        Action = [
          "@store.dynamodb@",
        ]
        Resource = aws_dynamodb_table.oncebridge.arn
      },
      {
        Sid    = "DeadLetters"
        Effect = "Allow"
        Action = [
          "@function.dead@",
        ]
        Resource = aws_sqs_queue.dead.arn
      },
    ], local.rights)
  })
}

#: worker
# --- the workers ----------------------------------------------------------------------------

resource "aws_iam_policy" "oncebridge" {
  name_prefix = "${var.name}-"
  description = "What the workers of oncebridge do."

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat([
      {
        Sid    = "Queue"
        Effect = "Allow"
        Action = [
          "@source.sqs@",
        ]
        Resource = aws_sqs_queue.queue.arn
      },
      {
        Sid    = "Remember"
        Effect = "Allow"
        Action = [
          "@store.dynamodb@",
        ]
        Resource = aws_dynamodb_table.oncebridge.arn
      },
      {
        Sid    = "DeadLetters"
        Effect = "Allow"
        Action = [
          "@dead.sqs@",
        ]
        Resource = aws_sqs_queue.dead.arn
      },
    ], local.rights)
  })
}

locals {
  has_role = var.runs_on != "elsewhere"
  issuer   = join("", slice(split(":oidc-provider/", "${var.oidc_provider_arn}:oidc-provider/"), 1, 2))

  # Only for what runs in this account. An instance does not tell where it runs.
  here = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id }

  trusts = {
    ecs = {
      Effect    = "Allow"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Action    = ["sts:AssumeRole"]
      Condition = {
        StringEquals = local.here
        ArnLike = {
          "aws:SourceArn" = "arn:${data.aws_partition.current.partition}:ecs:*:${data.aws_caller_identity.current.account_id}:*"
        }
      }
    }
    ec2 = {
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = ["sts:AssumeRole"]
    }
    pod-identity = {
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = { StringEquals = local.here }
    }
    irsa = {
      Effect    = "Allow"
      Principal = { Federated = var.oidc_provider_arn }
      Action    = "sts:AssumeRoleWithWebIdentity"
      Condition = { StringEquals = {
        "${local.issuer}:aud" = "sts.amazonaws.com"
        "${local.issuer}:sub" = "system:serviceaccount:${var.service_account}"
      } }
    }
  }
}

resource "aws_iam_role" "oncebridge" {
  count       = local.has_role ? 1 : 0
  name_prefix = "${substr(var.name, 0, 30)}-"
  description = "What the workers of oncebridge are."

  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [local.trusts[var.runs_on]]
  })

  lifecycle {
    precondition {
      condition     = var.runs_on != "irsa" || var.oidc_provider_arn != ""
      error_message = "For irsa, give the oidc_provider_arn of the cluster."
    }
  }
}

resource "aws_iam_role_policy_attachment" "oncebridge" {
  count      = local.has_role ? 1 : 0
  role       = aws_iam_role.oncebridge[0].name
  policy_arn = aws_iam_policy.oncebridge.arn
}

resource "aws_iam_instance_profile" "oncebridge" {
  count       = var.runs_on == "ec2" ? 1 : 0
  name_prefix = "${substr(var.name, 0, 30)}-"
  role        = aws_iam_role.oncebridge[0].name
}

#: both
# --- what needs you -------------------------------------------------------------------------

resource "aws_cloudwatch_metric_alarm" "kept" {
  for_each = {
    (aws_sqs_queue.undelivered.name) = "The rule of oncebridge could not deliver events; they are kept in this queue."
    (aws_sqs_queue.failed.name)      = "Messages came back too often and were set aside in this queue."
    (aws_sqs_queue.dead.name)        = "oncebridge keeps events in this queue that can never be passed on as they are."
  }

  alarm_name          = each.key
  alarm_description   = each.value
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = each.key }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.tell
  ok_actions          = local.tell
}

resource "aws_cloudwatch_metric_alarm" "age" {
  alarm_name          = "${var.name}-age"
  alarm_description   = "Events wait in the queue of oncebridge; the sink or the store may be down."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.queue.name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 3
  threshold           = var.alarm_age
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.tell
  ok_actions          = local.tell
}

#: lambda
resource "aws_cloudwatch_metric_alarm" "function" {
  for_each = merge(
    {
      Errors    = "The function of oncebridge failed as a whole; its log says why."
      Throttles = "The function of oncebridge was not allowed to run; its concurrency is too low."
    },
    var.trigger == "queue" ? {} : {
      DestinationDeliveryFailures = "Lambda could not set aside what failed, and dropped it."
    },
  )

  alarm_name          = "${var.name}-${lower(each.key)}"
  alarm_description   = each.value
  namespace           = "AWS/Lambda"
  metric_name         = each.key
  dimensions          = { FunctionName = aws_lambda_function.oncebridge.function_name }
  statistic           = "Sum"
  period              = 300
  evaluation_periods  = each.key == "Throttles" ? 3 : 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.tell
  ok_actions          = local.tell
}

output "function" {
  description = "The function."
  value       = aws_lambda_function.oncebridge.arn
}

output "role" {
  description = "The role of the function; attach to it what a sink of yours needs besides."
  value       = aws_iam_role.oncebridge.name
}

#: worker
output "source" {
  description = "What to set as the source of oncebridge."
  value       = "sqs:${aws_sqs_queue.queue.url}"
}

output "policy_arn" {
  description = "The policy of the workers."
  value       = aws_iam_policy.oncebridge.arn
}

output "role_arn" {
  description = "The role of the workers."
  value       = one(aws_iam_role.oncebridge[*].arn)
}

output "profile" {
  description = "The instance profile of the workers."
  value       = one(aws_iam_instance_profile.oncebridge[*].name)
}

#: both
output "store" {
  description = "What to set as the store of oncebridge."
  value       = "dynamodb://${aws_dynamodb_table.oncebridge.name}?region=${data.aws_region.current.name}"
}

output "dead" {
  description = "What to set as the dead letters of oncebridge."
  value       = "sqs:${aws_sqs_queue.dead.url}"
}

output "queue" {
  description = "Where events wait."
  value       = aws_sqs_queue.queue.url
}

output "failed" {
  description = "Where messages are that came back too often."
  value       = aws_sqs_queue.failed.url
}

output "undelivered" {
  description = "Where events are that the rule could not deliver."
  value       = aws_sqs_queue.undelivered.url
}
