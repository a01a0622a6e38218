"""Offline RL: learn from synthetic games of mixed quality to push a point to the origin, given a target return."""

import torch

from flowformer.models.decision import DecisionConfig, FlowformerDecision

torch.manual_seed(0)
starts, skill = 2 * torch.rand(64, 2) - 1, torch.rand(64, 1)  # skill: how often a player knows where to go
state, games = starts, []
for _ in range(20):
    action = torch.where(torch.rand(64, 1) < skill, (-state / 0.3).clamp(-1, 1), 2 * torch.rand(64, 2) - 1)
    games.append((state, action))
    state = state + 0.3 * action
states, actions = (torch.stack(part, 1) for part in zip(*games, strict=True))
rewards = -(states + 0.3 * actions).norm(dim=-1)
returns = rewards.flip(1).cumsum(1).flip(1)
print(f"recorded returns: mean {returns[:, 0].mean():.1f}, best {returns[:, 0].max():.1f}")
model = FlowformerDecision(DecisionConfig(state_dim=2, action_dim=2, num_layers=2, embed_dim=32, mlp_dim=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(40):
    optimizer.zero_grad()
    model.loss(returns, states, actions).backward()
    optimizer.step()
for target, window in ((-20, None), (-3, None), (-3, 20)):  # with the recurrent state, and with the paper's window
    state, earned, rollout = starts, torch.zeros(64), model.eval().new_rollout(64, window=window)
    for _ in range(20):
        action, rollout = model.act(target - earned, state, rollout)
        state = state + 0.3 * action
        earned = earned - state.norm(dim=-1)
    print(f"asked for {target}, window {window}: mean return {earned.mean():.1f}")
