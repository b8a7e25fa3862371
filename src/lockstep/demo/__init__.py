"""The whole road on one small model, from checkpoint to served answer, with every claim checked."""
