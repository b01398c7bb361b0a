# BB Table 13: 134M parameters, 52 billion tokens. docs/gpu.md has the whole command.
# BB's text is OpenWebText: --source openwebtext.jsonl, made as configs/llama_60m.py says.
# As it stands the text is Python's own standard library, which needs no network.
out = "runs/nano_llama"
model = "nano_llama"
tokenizer = "bpe:32000"  # the paper's is Llama 2's: --tokenizer PATH/tokenizer.model
sequence_length = 2048
global_batch_size = 128  # x 2048 = 262,144 tokens a step; the paper: 32 x 2 accumulated x 2 GPUs
micro_batch_size = 32
learning_rate = 6e-4  # the paper's value is lost
warmup_iters = 2000
max_iters = 200_000
log_every = 10
eval_every = 1000
save_every = 1000
