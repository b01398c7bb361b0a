# A sink at the first position, whatever letter stands there: two layers of two heads look for letters (ours).
# The weight decay makes it (docs/sinks.md); three minutes.
out = "runs/matching"
model = "matching"
source = ("matching",)
tokenizer = "bytes"
sequence_length = 24  # half a document: every other window begins with BOS
global_batch_size = 128  # x 24 = 3,072 tokens a step
micro_batch_size = 128
learning_rate = 3e-3
weight_decay = 0.5
warmup_iters = 100
max_iters = 3000
log_every = 100
eval_every = 300
eval_sequences = 256
save_every = 1000
track_sinks = True
