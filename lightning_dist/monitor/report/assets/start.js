// Puts the parts to work.
timeline();
const draws = [...document.querySelectorAll(".plot[data-metric]")].map(curves);
const course = document.getElementById("phases");
if (course && data.course.steps.length) draws.push(phases(course));
for (const id of ["axis", "highlight"]) {
  document.getElementById(id).addEventListener("change", () => draws.forEach((draw) => draw()));
}
