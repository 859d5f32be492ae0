"""Scripts of a job, one file a scheduler: `render(job, settings) -> Rendered`, pure. Bash that shellcheck accepts."""
