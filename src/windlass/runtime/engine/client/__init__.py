"""The engine as a Client: text to tokens and back, requests over a transport to the engine process. No torch."""
