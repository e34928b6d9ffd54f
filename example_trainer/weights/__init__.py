"""What the trainer's weights are and where they live, apart from how they travel (example_trainer/bridges).

source.py     WeightSource: what a bridge that sends bytes asks of the weights, whatever their layout
flat.py       one device: all parameters are views into one buffer in wire order
shared.py     single copy: the parameters are vLLM's own memory, in pieces (sharded.py) with tensor parallelism
manifest.py   the sizes and digests of a directory's files: noted, and compared
written.py    a directory in the Hugging Face format, whole or absent: checkpoints, and modes that hand over files
"""
