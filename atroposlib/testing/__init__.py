"""What tests of environments need and users may need too: a fake inference server and tiny tokenizers."""
