"""Training: supervised fine-tuning, and the step, optimizer, packing and checkpoints RL shares.

What `rl` builds on (nothing in these modules knows of SFT):

    from lockstep.train.packing import Document, MicroBatch, pack
        Document(token_ids=..., loss_weights=..., columns={"advantages": ..., ...})
            arrays of one length; entry i belongs to token i, as in `core.records.Trajectory`
        pack(documents, max_tokens=8192) -> list[MicroBatch]
        MicroBatch: tokens_T, positions_T, attention(); and for the R tokens that carry loss:
            rows_R (the row of `hidden_TD` that predicts each), targets_R, weights_R, columns[name]
        total_weight(micro_batches) -> float          # the token-mean's normaliser

    from lockstep.train.step import LossSum, StepMetrics, target_statistics, train_step
        target_statistics(model, micro_batch, inverse_temperature=1.0)
            -> .logprobs_T (R values, differentiable), .entropy_T (R values)
        loss_fn(model, micro_batch) -> LossSum(total=<sum, not mean>, sums={"name": <scalar>})
        train_step(model, optimizer, micro_batches, loss_fn, normaliser=..., max_grad_norm=1.0)
            -> StepMetrics(loss, grad_norm, num_tokens, num_loss_tokens, sums)
            gradient of sum(totals) / normaliser, whatever the split into micro-batches

    from lockstep.train.config import OptimizerConfig, ScheduleConfig      # no torch
    from lockstep.train.trainer import Trainer
        Trainer(model, optimizer=OptimizerConfig(...), schedule=ScheduleConfig(...), num_steps=n)
        trainer.update(micro_batches, loss_fn, normaliser=...) -> StepMetrics   # also sets the rate
        trainer.save(root, state={...json...}, config={...json...}, keep=2) -> Path
        trainer.resume(root, config={...}, may_differ=("keep",), on_message=print) -> state | None

    from lockstep.train.checkpoint import save, load, latest    # what Trainer uses
"""
