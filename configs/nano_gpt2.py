# BB Table 1a's model, trained by nano_llama's recipe at its context of 1,024.
out = "runs/nano_gpt2"
model = "nano_gpt2"
tokenizer = "bpe:32000"  # the paper's: --tokenizer tiktoken:gpt2, which wants a network once
sequence_length = 1024
global_batch_size = 256  # x 1024 = 262,144 tokens a step
micro_batch_size = 32
learning_rate = 6e-4
warmup_iters = 2000
max_iters = 200_000
eval_every = 1000
save_every = 1000
