"""CPU implementations in C++ (native/), and native collectives between ranks. None means: inputs not supported."""
