# Sinks on text, on one core in ten minutes: a LLaMA of 0.8M parameters in its blocks, with what favours
# sinks: wide heads, BOS first in every sequence, strong weight decay (Gu et al. 2024; docs/sinks.md).
out = "runs/text_sink"
model = "tiny_llama"  # in another size:
num_layers = 4
num_heads = 2  # of 128 / 2 = 64 dimensions
d_model = 128
d_ff = 344
source = ("packages",)
tokenizer = "bpe:2048"
sequence_length = 256
bos_first = True
global_batch_size = 16  # x 256 = 4,096 tokens a step
micro_batch_size = 16
dtype = "float32"
learning_rate = 1.5e-3  # of 0.8e-3, 3e-3 and 6e-3 none grows a sink as early
weight_decay = 0.5
warmup_iters = 100
max_iters = 1536  # 6.3M tokens
log_every = 50
eval_every = 128
eval_sequences = 100
save_every = 128
keep = "all"
track_sinks = True
