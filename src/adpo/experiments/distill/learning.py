"""Students of one method, all seeds at once, from the lessons of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adpo.core.temperature import GuardedTau
from adpo.experiments.distill import students
from adpo.experiments.distill.actor import Gaussian
from adpo.experiments.distill.lessons import Lessons
from adpo.experiments.distill.methods import Batch, Method
from adpo.experiments.stacked import Weights, guarded_taus
from adpo.system.devices import best_device

EDGE = 0.999
"""Uniform candidates stay inside: at the edge of the squash there is no ``u``."""


@dataclass(frozen=True)
class Course:
    """How students are taught."""

    steps: int = 2000
    batch: int = 128
    learning_rate: float = 5e-3  # at first; half a cosine from there to nothing
    weight_decay: float = 0.0
    hidden: int = 64
    candidates: int = 16
    of_teacher: float = 0.5  # share of the candidates; the rest is the student's, less the uniform ones
    uniform: float = 0.0

    def counts(self) -> tuple[int, int, int]:
        """Candidates of teacher, student and uniform draw."""
        teacher, uniform = round(self.of_teacher * self.candidates), round(self.uniform * self.candidates)
        return teacher, self.candidates - teacher - uniform, uniform


def drawn_candidates(course: Course, teacher: Gaussian, student: Gaussian, draw: torch.Generator) -> Tensor:
    """``[runs, n, K, actions]`` before the squash: the teacher's, the student's as it is now, and uniform ones."""
    shape, device = teacher.mean.shape, draw.device
    parts = []
    of_teacher, of_student, uniform = course.counts()
    for policy, count in ((teacher, of_teacher), (student, of_student)):
        noise = torch.randn(*shape[:-1], count, shape[-1], generator=draw, device=device)
        parts.append(policy.mean.detach().unsqueeze(-2) + policy.log_std.detach().exp().unsqueeze(-2) * noise)
    spread = 2 * torch.rand(*shape[:-1], uniform, shape[-1], generator=draw, device=device) - 1
    return torch.cat([*parts, torch.atanh(EDGE * spread)], -2)


def taught(
    method: Method,
    course: Course,
    lessons: Lessons,
    seeds: Sequence[int],
) -> Weights:
    """Weights of all students after the last step: they learn on the accelerator, if there is one."""
    device = best_device()
    lessons = lessons.to(device)
    runs = len(seeds)
    states, actions = lessons.states.shape[1], lessons.shown.shape[1]
    shift, scale = lessons.states.mean(0), lessons.states.std(0).clamp(min=1e-6)
    states_seen = (lessons.states - shift) / scale
    initial = students.initial(states, actions, course.hidden, seeds)
    weights = [value.to(device).requires_grad_() for value in initial]
    slow = [value.detach().clone() for value in weights]
    optimizer = torch.optim.AdamW(weights, lr=course.learning_rate, weight_decay=course.weight_decay)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, course.steps)
    guards = [GuardedTau(*method.guarded) for _ in seeds] if method.guarded is not None else []
    draw = torch.Generator(device).manual_seed(seeds[0])
    for _ in range(course.steps):
        places = torch.randint(len(lessons.states), (runs, course.batch), generator=draw, device=device)
        seen, of_teacher = states_seen[places], lessons.teacher(places)
        student = students.policy(weights, seen)
        batch = Batch(
            student,
            of_teacher,
            _anchor(method, student, slow, seen),
            drawn_candidates(course, of_teacher, student, draw) if method.compares else seen[..., None, :0],
            lessons.shown[places],
        )
        if guards:
            batch.tau = _guarded(guards, student, of_teacher)
        loss = method.loss(batch).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        slower.step()
        if method.anchor == "ema":
            students.averaged(slow, weights, method.decay)
    found = students.on_raw_states([value.detach() for value in weights], shift, scale)
    return [value.cpu() for value in found]


def _anchor(method: Method, student: Gaussian, slow: Weights, seen: Tensor) -> Gaussian | None:
    if method.anchor == "zero":
        return None
    if method.anchor == "self":
        return student
    with torch.no_grad():
        return students.policy(slow, seen)


def _guarded(guards: Sequence[GuardedTau], student: Gaussian, teacher: Gaussian) -> Tensor:
    """For each run, by how narrow a student is (of a width of one) and how much closer to the teacher."""
    with torch.no_grad():
        widths = student.log_std.mean((1, 2)).exp().clamp(max=1.0)
        return guarded_taus(guards, widths, -teacher.kl(student).mean(1))
