"""What a user does, a package each: plan, convert, launch, check, bench, serve, evaluate, route, train, observe.

Tasks never import one another: what two of them need is below, in core/ or runtime/, or is wired together in open/ and cli/.
"""
