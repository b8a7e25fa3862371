"""Reinforcement learning: rollouts from the engine, advantages, and updates through the trainer."""
