# A sink in minutes: two layers of one head learn bigrams, and to copy after triggers (Guo et al. 2024).
# Held-out loss of seeds 42 and 43: step 50 2.15, 2.13; of seed 42 step 100 2.05, step 300 1.99.
out = "runs/backcopy"
model = "backcopy"
source = ("backcopy",)
tokenizer = "bytes"
sequence_length = 128  # a document: BOS and 127 letters
global_batch_size = 64  # x 128 = 8,192 tokens a step
micro_batch_size = 64
dtype = "float32"  # in bfloat16 fewer heads sink than docs/sinks_in_training.md says
learning_rate = 3e-3
warmup_iters = 50
max_iters = 300
log_every = 50
eval_every = 50
save_every = 100
track_sinks = True
