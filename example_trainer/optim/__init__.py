"""AdamW in its forms: on the device, with moments in host memory, with bfloat16 weights and float32 masters;
and the average of the weights.

Imports settings and ranks.
"""
