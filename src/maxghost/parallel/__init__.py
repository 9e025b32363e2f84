"""Several devices: the mesh, logical axis rules, shardings, processes. `topologies` and `mesh` import no JAX."""
