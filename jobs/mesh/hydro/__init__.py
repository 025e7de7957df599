"""A two-dimensional Lagrangian hydrodynamics code on quadrilateral meshes: the source of the mesh-tangling data.

The mesh moves with an ideal gas. Velocities live on the nodes, thermodynamic quantities in the cells; the
discretisation is compatible, so that mass, momentum and total energy are conserved to round-off.

Arrays of cells are indexed ``[j, i]`` with ``j`` upwards (y, the H of a sample) and ``i`` to the right (x, its W).
Cell (j, i) has its four corners counter-clockwise::

    3 (j+1, i) ------ 2 (j+1, i+1)
        |     edge 2      |
        | edge 3   edge 1 |
        |     edge 0      |
    0 (j, i)  ------- 1 (j, i+1)

Lengths are in units of 128 initial cell sides, times such that flows move at about one unit of length per unit of time.

Source: Caramana, Burton, Shashkov, Whalen, "The construction of compatible hydrodynamics algorithms utilizing
conservation of total energy", J. Comput. Phys. 146 (1998).

::

    advance             Kernels of a time step: the stable step, the motion of nodes, the work done on cells
    cell_geometry       Geometry of quadrilateral cells: areas, corner volumes and scaled corner Jacobians
    exact_solutions     Exact solutions that the solver is measured against
    forces              Corner forces: what a cell does to its four nodes
    initial_conditions  Seeded initial conditions in five families of flow
    jit                 Compilation of the kernels. The only module that imports numba
    solver              The solver: a gas on its mesh, advanced in time
    state               What the kernels work on: named groups of arrays, which numba takes as they are
    viscosity           Edge artificial viscosity with a limiter
"""
