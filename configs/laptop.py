# A LLaMA of 6 layers x 256 on this Python's own source: writes almost-Python after minutes.
# Held-out loss of seeds 42 and 43: step 25 3.88, 3.86; step 50 3.58, 3.75; step 150 of seed 42 2.89.
out = "runs/laptop"
model = "tiny_llama"
sequence_length = 256
global_batch_size = 32  # x 256 = 8,192 tokens a step
micro_batch_size = 16
dtype = "float32"  # docs and results are of it
learning_rate = 3e-3
warmup_iters = 30
max_iters = 150
eval_every = 25
save_every = 50
