"""Speculative decoding: drafts of the tokens that follow, verified by the model several at a time. The output stays exactly the same."""
