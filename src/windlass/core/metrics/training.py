"""Metrics of a training run, of an evaluation and of a router."""

from __future__ import annotations

from windlass.core.metrics.metric import counter, gauge

LOSS = gauge("windlass_training_loss", "Loss of the last step.")
VALIDATION_LOSS = gauge("windlass_training_validation_loss", "The last loss on held-out data.")
LEARNING_RATE = gauge("windlass_training_learning_rate", "Learning rate of the last step.")
GRADIENT_NORM = gauge("windlass_training_gradient_norm", "Norm of the gradient before clipping.")
TOKEN_RATE = gauge("windlass_training_tokens_per_second", "Tokens a second in the last step, over all ranks.")
MFU = gauge("windlass_training_mfu_ratio", "Model FLOPs utilization, 0 to 1.")
EXPERT_BALANCE = gauge(
    "windlass_training_expert_balance_cv", "Standard deviation over mean of the tokens an expert gets; 0 is even."
)
STEPS = counter("windlass_training_steps_total", "Steps done by this process.")
STEP = gauge("windlass_training_step", "The last step, counted from the beginning of the run.")
PLANNED_STEPS = gauge("windlass_training_planned_steps", "Steps that the run will have.")
STEP_SECONDS = gauge("windlass_training_step_seconds", "Duration of the last step.")
SECONDS_LEFT = gauge("windlass_training_left_seconds", "Estimated time to the end of the run.")
TOKENS = counter("windlass_training_tokens_total", "Tokens since the run began, over all ranks and restarts.")
EVENTS = counter(
    "windlass_training_events_total", "Rollbacks (those for a NaN or an infinity also as not_finite) and checkpoints.", "kind"
)
LAST_CHECKPOINT = gauge(
    "windlass_training_last_checkpoint_timestamp_seconds", "When the last checkpoint was written; before it, when the run began."
)
CHECKPOINT_INTERVAL = gauge(
    "windlass_training_checkpoint_interval_seconds", "Longest time between two checkpoints so far; 0 before the second."
)

EVAL_QUESTIONS = gauge("windlass_eval_questions", "Questions of the evaluation.")
EVAL_ANSWERED = counter("windlass_eval_answers_total", "Answers so far, by verdict (correct, wrong, failed, pending).", "verdict")
EVAL_TOKENS = counter("windlass_eval_tokens_total", "Tokens used, by kind (prompt, completion).", "kind")
EVAL_LEFT = gauge("windlass_eval_left_seconds", "Estimated time to the end of the evaluation.")
EVAL_COST = gauge("windlass_eval_cost_usd", "Dollars spent by this process.")

ROUTE_DECISIONS = counter("windlass_route_decisions_total", "Requests by the model that the router chose.", "model")
ROUTE_EXPECTED_SHARE = gauge(
    "windlass_route_expected_share_ratio", "Share of requests that each model got on the data the router was fitted to.", "model"
)
