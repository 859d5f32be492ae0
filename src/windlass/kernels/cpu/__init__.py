"""Operations in C++ for CPUs (native/), and the native links between ranks."""
