"""The search: what is asked, which engines and schemes it allows, and the best layout of them."""
