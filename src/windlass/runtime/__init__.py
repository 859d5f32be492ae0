"""What computes: this machine, groups of ranks, kernels, packed weights and how they are loaded, the decoder, offload, the engine, the fleet.

Rows, lowest first: machine, parallel and kernels; quant; weights; nn and offload; engine; fleet. Models and files are read by model/.
"""
