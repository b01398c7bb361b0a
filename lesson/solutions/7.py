"""7. What is a sink made of? Write `stand_in`."""


def stand_in(model, silent, tokens):
    """One vector (576,) that does the work of two silent neurons, whatever the text.

    `model` is SmolLM2; `silent` is the same, but units 1229 and 1487 of layer 12 write nothing. `tokens`
    (20, 64) are windows of text. The check adds the vector to what layer 12 writes in `silent`, at
    position 1 and nowhere else, and reads 20 other windows. `model.hidden(tokens, on_state=f)` calls
    `f(layer, x)` with the stream x (20, 64, 576) after each layer, from 1 on (0: the embeddings).
    """

    def first_state(model):
        """The stream at position 1 after layer 12, the mean of all windows: (576,)."""
        states = []
        model.hidden(tokens, on_state=lambda layer, x: states.append(x[:, 0].mean(0)))
        return states[12]

    return first_state(model) - first_state(silent)
