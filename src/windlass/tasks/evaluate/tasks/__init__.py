"""Tasks as TOML: where their rows come from, how questions are asked, how answers are found and graded."""
