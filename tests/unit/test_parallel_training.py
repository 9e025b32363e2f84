"""The train step on meshes of eight virtual devices: the losses, gradients and scores of one device."""

import meshes
import pytest
from meshes import MESHES


@pytest.fixture(scope="module")
def one_device():
  made = {}

  def get(**changes):
    key = tuple(sorted(changes.items()))
    if key not in made:
      made[key] = meshes.run({}, **changes)
    return made[key]

  return get


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_numbers_of_one_device(name, one_device):
  meshes.assert_same(meshes.run(MESHES[name]), one_device())
