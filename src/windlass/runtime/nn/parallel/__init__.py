"""What differs when a decoder is one rank of several: its shard, sums, vocabulary, stages."""
