# A LLaMA of 6 layers x 256 on this Python's own source: writes almost-Python in minutes on 2 cores.
out = "runs/laptop"
model = "tiny_llama"
sequence_length = 256
global_batch_size = 32  # x 256 = 8,192 tokens a step
learning_rate = 1e-3
warmup_iters = 50
max_iters = 300
eval_every = 50
