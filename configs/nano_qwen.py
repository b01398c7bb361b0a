# BB Tables 9-12: nano_llama's recipe for a Qwen2 style of 347M parameters, most of them its vocabulary.
out = "runs/nano_qwen"
model = "nano_qwen"
tokenizer = "bpe:32000"  # Qwen's own 151,936 tokens have no SentencePiece file; the vocabulary follows
sequence_length = 2048
global_batch_size = 128
micro_batch_size = 8
learning_rate = 6e-4
warmup_iters = 2000
max_iters = 200_000
eval_every = 1000
save_every = 1000
