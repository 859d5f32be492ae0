"""What families share: typed config fields, rotary settings, rules from a table of names."""
