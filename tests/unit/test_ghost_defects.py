"""Known defects of other implementations of these scores, and the test that would catch each.

 1 outer product of sums, wrong for V > 1       test_ghost_rules::test_every_parameter_against_per_example_gradients
 2 tied table: the last use overwrites          test_ghost_scores::test_scores_per_parameter_layer_and_total
   a module used twice loses activations        test_ghost_foreign::test_a_layer_called_twice_adds_both_uses
 3 scale depends on n, V, accumulation          test_ghost_defects::test_dot_products_do_not_depend_on_batch_sizes
   learning rate not stored                     test_train_step::test_documents_have_the_scores_of_documents_alone
 4 rescaled by row counts, not tokens           test_ghost_identities::test_the_additive_form_weighs_examples_by_their_tokens
   reduction of the loss not forwarded          test_ghost_foreign::test_a_scaled_loss_scales_both_gradients_and_scaled_weights_nothing
 5 micro-batches overwrite each other           test_ghost_schedules_accumulation::test_no_micro_batch_overwrites_anothers_scores
 6 products and sums in bfloat16                test_ghost_rules_precision::test_long_sums_of_bfloat16_products_do_not_stall
 7 branch cached from the first batch           test_ghost_defects::test_one_engine_scores_batches_of_any_shape_in_any_order
 8 labels shifted twice                         test_ghost_defects::test_the_target_is_the_next_token_and_not_the_one_after
 9 scoring changes model or checkpoint          test_ghost_identities::test_the_model_is_not_changed
   dummy parameters left in the state           test_ghost_defects::test_nothing_of_the_engine_is_in_the_train_state
   frozen parameters changed                    test_ghost_engines::test_training_with_frozen_parameters_by_forward_mode_and_by_rules
10 data parallel: no reduction                  test_ghost_sharded::test_every_mesh_gives_the_numbers_of_one_device
   the same data on all ranks                   test_data::test_shards_end_to_end_are_the_single_order
   only rank 0 saves                            test_attribution_store::test_processes_are_merged
11 requested bfloat16 not used                  test_models::test_bfloat16_compute_with_float32_weights_computes_in_bfloat16
   unknown method only printed                  test_ghost_engines::test_unknown_names_and_combinations
   exit code 0 after an error                   test_cli::test_problems_found_later_by_the_command_exit_2_too
   padding ids ignored                          test_ghost_identities::test_tokens_in_padding_and_masked_targets_do_not_matter
12 validation with dropout                      test_ghost_schedules_step::test_validation_rows_see_no_dropout
   validation row never refreshed               test_training_loop::test_actual_drop_is_measured_on_the_rows_of_the_step
   random offsets instead of document ids       test_data::test_every_token_once_per_epoch_and_ids_lead_to_the_bytes
   totals only                                  test_train_step::test_contributions_by_parameter_sum_to_the_documents
13 every k-th batch kept, the rest dropped      test_ghost_manager::test_a_hand_written_loop
   re-attaching raises                          test_ghost_manager::test_an_evaluation_in_between_cannot_attach_a_batch
14 activations of another batch size            test_ghost_defects::test_one_engine_scores_batches_of_any_shape_in_any_order
   too few validation rows shift the split      test_ghost_defects::test_concat_refuses_another_number_of_validation_rows
   validation gradients leak into training      test_ghost_schedules::test_concat_refuses_layers_it_cannot_keep_apart
15 compiled path returns zeros                  test_ghost_defects::test_scores_that_are_all_zero_fail_the_self_check
16 per-example gradients in memory after all    test_ghost_defects::test_no_array_of_a_scored_pass_has_an_axis_of_examples_and_all_of_a_weight
17 greedy selection ignores its weights         test_selection::test_greats_takes_one_of_two_copies_and_equals_exhaustive_greedy
18 bias gradients summed over the batch         test_ghost_rules::test_every_parameter_against_per_example_gradients
"""  # noqa: E501

import re
from pathlib import Path

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import ghost
from maxghost.ghost import engine, rules
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.directions import GhostDirection, GhostProbe
from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import LanguageModelLoss


def test_the_table_names_tests_that_exist():
  rows = re.findall(r"(test_\w+)::(test_\w+)$", __doc__, re.MULTILINE)
  assert {int(n) for n in re.findall(r"^ ?(\d+) ", __doc__, re.MULTILINE)} == set(range(1, 19))
  assert len(rows) == len(__doc__.strip().splitlines()) - 2
  for file, name in rows:
    assert f"def {name}(" in (Path(__file__).parent / f"{file}.py").read_text(), f"{file}::{name}"


class Classifier(nnx.Module):
  """Token ids [n, T] of any length to logits [n, 5]."""

  def __init__(self, rngs):
    self.table, self.dense = nnx.Embed(19, 7, rngs=rngs), nnx.Linear(7, 11, rngs=rngs)
    self.norm, self.out = nnx.LayerNorm(11, rngs=rngs), nnx.Linear(11, 5, rngs=rngs)

  def __call__(self, ids):
    return self.out(self.norm(jnp.tanh(self.dense(self.table(ids)))).mean(1))


def loss_fn(model, batch):
  """(losses [n], weights [n])."""
  return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][:, None], -1)[:, 0], batch["w"]


def make_batch(num: int, length: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  weights = (rng.random(num) + 0.2).astype(np.float32)
  return {"x": rng.integers(0, 19, (num, length)), "y": rng.integers(0, 5, num), "w": weights}


def test_one_engine_scores_batches_of_any_shape_in_any_order():
  """Rows, lengths and validation rows change from call to call, and back again."""
  model, engine = foreign.randomized(Classifier, scale=0.2), ghost.GhostEngine()
  shapes = [(6, 9, 4), (3, 9, 4), (6, 2, 4), (6, 9, 1), (6, 9, 4)]
  for seed, (num, length, num_val) in enumerate(shapes):
    train, val = make_batch(num, length, seed), make_batch(num_val, length, 10 + seed)
    result = foreign.score(engine, model, train, val, loss_fn=loss_fn)
    oracle = foreign.Oracle(model, loss_fn, train, val)
    foreign.assert_scores(result.per_param, oracle.dots(oracle.G[0]), 1e-5)


def test_dot_products_do_not_depend_on_batch_sizes():
  """Rows twice, validation rows three times: `dot` stays, the share of a row in the step halves."""
  model = foreign.randomized(Classifier)
  train, val = make_batch(6, 9, 1), make_batch(4, 9, 2)
  once = foreign.score(ghost.GhostEngine(), model, train, val, loss_fn=loss_fn)
  twice = {name: np.concatenate([v, v]) for name, v in train.items()}
  thrice = {name: np.concatenate([v, v, v]) for name, v in val.items()}
  result = foreign.score(ghost.GhostEngine(), model, twice, thrice, loss_fn=loss_fn)
  for half in (slice(None, 6), slice(6, None)):
    assert oracles.relative_error(result.dot[half], once.dot) < 1e-5
    assert oracles.relative_error(2 * result.additive[half], once.additive) < 1e-5


def test_the_target_is_the_next_token_and_not_the_one_after():
  """A model that copies its input to its output (a tied table, orthogonal rows, no layers that matter) has a low loss
  where the target is the token itself, and a high one where batches with shifted targets are shifted again."""
  cfg = tiny.make_config(logits_via_embedding=True, base_emb_dim=300, base_num_decoder_layers=1, remat_policy="none")
  values = {
    k: np.zeros(v.shape, np.float32) for k, v in tiny.abstract_by_label(tiny.models.create_abstract(cfg)).items()
  }
  values["token_embedder/embedding"] = 30 * np.eye(tiny.VOCAB, 300, dtype=np.float32)
  values["decoder/decoder_norm/scale"] += 1
  model = tiny.with_values(tiny.models.create_abstract(cfg), values)
  batch = tiny.make_batch(((13,), (13,)), seed=3, mask=0.0)
  same = {**batch, "targets": batch["inputs"]}
  with tiny.cheap_compilation():
    losses = [np.asarray(LanguageModelLoss()(model, b)[0]).mean() for b in (same, batch)]
  assert losses[0] < 0.01
  assert losses[1] > 100


def shapes_after_a_step(run: Run, val):
  return jax.eval_shape(run.function, run.state, TRAIN[0], (val,))


def test_nothing_of_the_engine_is_in_the_train_state():
  """Neither before a step nor after it, under any schedule: what is saved is what a run without scores saves."""
  plain = Run(ghost_enabled=False)
  for schedule in ("two_pass", "reverse_scan", "concat"):
    run = Run(ghost_schedule=schedule, ghost_val_batch_size=len(VALIDATION["inputs"]))
    state, _ = shapes_after_a_step(run, VALIDATION)
    for now in (run.state, state):
      assert jax.tree.structure(now) == jax.tree.structure(plain.state)
      assert not [v for _, v in nnx.to_flat_state(now) if isinstance(v, (GhostProbe, GhostDirection))]


def test_concat_refuses_another_number_of_validation_rows():
  """Two rows are configured and five come: the first three would count as training rows."""
  run = Run(ghost_schedule="concat", ghost_val_batch_size=2)
  with pytest.raises(ValueError, match=r"leading axes must be the examples and positions \(9, 13\)"):
    shapes_after_a_step(run, VALIDATION)


def test_scores_that_are_all_zero_fail_the_self_check(monkeypatch):
  monkeypatch.setattr(rules.Call, "reduce", lambda self, left, right: jnp.zeros(left.shape[: self.resolution]))
  run = Run(base_num_decoder_layers=1, remat_policy="none", ghost_direction="sgd")
  out = run.step(TRAIN[0])
  assert (out["score_dot_BSK"] == 0).all()
  assert out["check_rel_err"][0] > 1


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_no_array_of_a_scored_pass_has_an_axis_of_examples_and_all_of_a_weight(kind):
  """Seven rows times a weight of 20 x 36: no intermediate result has all these axes. (The memory of the compiled step
  against the plain one is in benchmarks/ghost_overhead.py.)"""
  cfg = tiny.make_config(remat_policy="none")
  model, batch = tiny.make_model(cfg), TRAIN[0]
  twin = prepare_twin(
    model,
    batch,
    LanguageModelLoss(),
    num_sets=1,
    num_positions=13,
    spec=engine.direction_spec(tiny.make_config(), kind),
  )
  _, params, rest = nnx.split(model, nnx.Param, ...)
  parts = {p.label: tuple(jnp.zeros(p.part_shapes(1)[name]) for name in p.parts) for p in twin.scored}
  jaxpr = jax.make_jaxpr(
    lambda p, b: passes.train_pass(
      Model(twin.graphdef, p, rest), LanguageModelLoss(), b, twin, twin.direction_state(parts)
    )
  )(params, batch)
  shapes = {v.aval.shape for e in tiny.equations(jaxpr) for v in e.outvars}
  weights = [(20, 36), (36, 20), (20, 8, 6), (20, 263)]
  for shape in shapes:
    for weight in weights:
      left = list(shape)
      for size in (*weight, tiny.ROWS):
        if size not in left:
          break
        left.remove(size)
      else:
        raise AssertionError(f"{shape} holds {weight} for every row")
  assert any(set((20, 36)) <= set(shape) for shape in shapes)
