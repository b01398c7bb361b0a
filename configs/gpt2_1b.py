# BB Table 1c's model, 1.3B parameters: float32 weights and AdamW take 21 GB.
out = "runs/gpt2_1b"
model = "gpt2_1b"
tokenizer = "bpe:32000"  # the paper's: --tokenizer tiktoken:gpt2
sequence_length = 1024
global_batch_size = 256
micro_batch_size = 8
learning_rate = 3e-4  # half of the small models', for ten times their size
warmup_iters = 2000
max_iters = 200_000
eval_every = 1000
save_every = 1000
