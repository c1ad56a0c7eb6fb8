import netcl.autograd as ag
from netcl.io import save_model

# 1. DataLoader yields a NumPy batch
for x, y in loader:                       # data API

    # 2. Tensor factory copies to device
    x_t = Tensor.from_host(queue, x)      # core API
    y_t = Tensor.from_host(queue, y)

    # 3. nn.Module forward — differentiable, recorded by the Tape
    with ag.Tape() as tape:
        logits = model(x_t)               # nn API
        loss = ag.cross_entropy(logits, y_t)  # autograd API

    # 4. Tape backward
    tape.backward(loss)                   # autograd API

    # 5. Optimizer step
    opt.step()                            # optim API
    opt.zero_grad()

    # 6. Checkpoint / sync
    save_model(model, "ckpt.netcl")       # io API
    sync_grads(replicas)                  # distributed API
