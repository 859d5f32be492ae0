"""safetensors files: headers, stores, shards, a writer."""
