"""A worker's weights as bytes: where each Hugging Face tensor lies, and the buffers that two processes share."""
