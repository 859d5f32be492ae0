"""OpenAI's API as values: what is asked and answered over HTTP, both ways. Knows no server and no engine.

Reading: `decode` makes a struct of a body or says which parameter is wrong; `requests` makes a core Request of it (and back);
`answers` makes chunks and responses of Deltas; `reading` makes Deltas of them again; `http_client` is a core Client over HTTP.
"""
